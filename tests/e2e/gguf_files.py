"""GGUF files of models with Mamba-2, as llama.cpp's converter writes them, with the `gguf` package's table of names.

Source: conversion/mamba.py, granite.py, nemotron.py and falcon_h1.py in llama.cpp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.unit.gguf.files import write

Tensors = dict[str, torch.Tensor]


def convert_nemotron_h(folder: Path, config: Any, path: Path) -> Path:
    """Write the file of a Nemotron-H folder; sizes that only some layers have are stated for each layer."""
    kinds = config.layers_block_type
    is_sparse = "moe" in kinds
    inner, heads = config.mamba_num_heads * config.mamba_head_dim, config.mamba_num_heads
    entries = {
        **_common(config, len(kinds), inner, heads, config.ssm_state_size, config.n_groups, config.conv_kernel),
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.head_count_kv": [config.num_key_value_heads * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [config.intermediate_size * (kind == "mlp") for kind in kinds],
    }
    if is_sparse:
        entries |= {
            "feed_forward_length": [config.moe_intermediate_size * (kind == "moe") for kind in kinds],
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
    found = _stack_experts(load_file(folder / "model.safetensors"))
    kind = "NEMOTRON_H_MOE" if is_sparse else "NEMOTRON_H"
    return _write(path, kind, len(kinds), _as_mamba(found, config.n_groups), entries)


def convert_falcon_h1(folder: Path, config: Any, path: Path) -> Path:
    """Write the file of a Falcon-H1 folder; its factors are multiplied into the weights."""
    groups, inner, heads = config.mamba_n_groups, config.mamba_d_ssm, config.mamba_n_heads
    sizes = inner, heads, config.mamba_d_state, groups, config.mamba_d_conv
    entries = {
        **_common(config, config.num_hidden_layers, *sizes),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.head_count_kv": config.num_key_value_heads,
        "feed_forward_length": config.intermediate_size,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    gate, down = config.mlp_multipliers
    state = groups * config.mamba_d_state
    rows = torch.tensor(config.ssm_multipliers).repeat_interleave(torch.tensor([inner, inner, state, state, heads]))
    reads = config.attention_in_multiplier
    factors = {
        "mamba.in_proj.": config.ssm_in_multiplier * rows[:, None],
        "mamba.out_proj.": config.ssm_out_multiplier,
        "q_proj.": reads,
        "k_proj.": reads * config.key_multiplier,
        "v_proj.": reads,
        "o_proj.": config.attention_out_multiplier,
        "gate_proj.": gate,
        "down_proj.": down,
        "lm_head.": config.lm_head_multiplier,
        "embed_tokens.": config.embedding_multiplier,
    }
    found = load_file(folder / "model.safetensors")
    for name, tensor in found.items():
        found[name] = tensor * next((factor for part, factor in factors.items() if f"{part}weight" in name), 1.0)
    return _write(path, "FALCON_H1", config.num_hidden_layers, _as_mamba(found, groups), entries)


def _common(config: Any, layers: int, inner: int, heads: int, states: int, groups: int, kernel: int) -> dict[str, Any]:
    return {
        "block_count": layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": states,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }


def _stack_experts(found: Tensors) -> Tensors:
    """With the experts of a layer as one tensor."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(
        (n for n in found if ".experts." in n), key=lambda n: int(n.split(".experts.")[1].split(".")[0])
    ):
        before, after = name.split(".experts.")
        stacks.setdefault(f"{before}.experts.{after.split('.', 1)[1]}", []).append(found[name])
    plain = {name: tensor for name, tensor in found.items() if ".experts." not in name}
    return {**plain, **{name: torch.stack(parts) for name, parts in stacks.items()}}


def _as_mamba(found: Tensors, groups: int) -> Tensors:
    """With a mixer's vectors as the converter shapes and names them."""
    out = {}
    for name, tensor in found.items():
        mixer = name.endswith(("mamba.norm.weight", "mixer.norm.weight"))
        if name.endswith("conv1d.weight"):
            tensor = tensor.squeeze(1)
        elif name.endswith((".A_log", ".D")):
            tensor = (-tensor.exp() if name.endswith(".A_log") else tensor)[:, None]
        elif mixer:
            tensor = tensor.reshape(groups, -1)
        out[name.replace(".dt_bias", ".dt_proj.bias").replace("correction_bias", "correction.bias")] = tensor
    return out


def _write(path: Path, kind: str, layers: int, found: Tensors, entries: dict[str, Any]) -> Path:
    architecture = gguf.MODEL_ARCH[kind]
    names = gguf.get_tensor_name_map(architecture, layers)
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name, tensor in found.items():
        # The converter names stacks of experts so, whichever module has them.
        known = name.replace("backbone.", "model.").replace("mixer", "mlp") if ".experts." in name else name
        title = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert title is not None, name
        tensors[title] = "F32", tensor.float().contiguous().numpy()
    return write(path, tensors, entries, gguf.MODEL_ARCH_NAMES[architecture])
