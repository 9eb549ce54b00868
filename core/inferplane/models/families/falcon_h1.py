"""Falcon-H1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from inferplane.errors import UnsupportedModelError
from inferplane.models.build import Build
from inferplane.models.parts import LayerForm, decoder_model, grouped_query_attention, mamba2, mamba2_of_config
from inferplane.models.parts.rotation import head_size
from inferplane.models.registry import architecture
from inferplane.ops import ActivationMul, CausalLM, GatedMLP, HybridBlock, RecurrentBlock
from inferplane.types import Weight

FACTORS = (
    "lm_head_multiplier", "embedding_multiplier", "key_multiplier", "attention_out_multiplier",
    "attention_in_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip


@architecture(
    "FalconH1ForCausalLM",
    model_type="falcon_h1",
    defaults={
        **dict.fromkeys(FACTORS, 1.0), "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
        "mamba_proj_bias": False, "mamba_norm_before_gate": True, "mamba_rms_norm": False, "projectors_bias": False,
        "attention_bias": False, "mlp_bias": False,
    },
    aliases={"layers_block_type": "layer_types"},
)  # fmt: skip
def falcon_h1(build: Build) -> CausalLM:
    """Falcon-H1: attention and Mamba-2 side by side in every layer, and factors on what most parts read and return.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2507.22448.
    """
    config = build.config
    config.refuse(hidden_act=("silu",))
    f = {entry: config.factor(entry) for entry in FACTORS}
    bias, scale = config.flag("attention_bias"), head_size(config) ** -0.5 * config.attention_factor("key_multiplier")
    attention, recurrence = grouped_query_attention(build, bias=bias, out_bias=bias, scale=scale), _mamba(build)
    attn_factors = f["attention_in_multiplier"], f["attention_out_multiplier"]
    mamba_factors = f["ssm_in_multiplier"], f["ssm_out_multiplier"]

    def mix(i: int, name: str) -> HybridBlock:
        return HybridBlock(attention(i, name), recurrence(i, f"model.layers.{i}.mamba"), attn_factors, mamba_factors)

    form = LayerForm(before=("input_layernorm", "pre_ff_layernorm"), last="final_layernorm")
    factors: dict[str, Any] = {"embed_factor": f["embedding_multiplier"], "logit_factor": f["lm_head_multiplier"]}
    return decoder_model(build, mix, _mlp(build), form, **factors)


def _mlp(build: Build) -> Any:
    """A function that builds a layer's MLP."""
    config = build.config
    gate, down = config.numbers("mlp_multipliers", 2, 1.0)
    inner, width, bias = config.size("intermediate_size"), config.size("hidden_size"), config.flag("mlp_bias")
    if bias and down != 1:
        raise UnsupportedModelError(f"{config.name}: mlp_bias beside mlp_multipliers.", there_is="one of them")

    def mlp(i: int, name: str) -> GatedMLP:
        plain = build.mlp(f"model.layers.{i}.feed_forward", inner, width, bias=bias)
        return plain if (gate, down) == (1, 1) else replace(plain, act=ActivationMul("silu", (gate, down)))

    return mlp


def _mamba(build: Build) -> Any:
    """A function that builds a layer's Mamba-2 mixer, with its states."""
    config = build.config
    inner = None if config.get("mamba_d_ssm") is None else config.size("mamba_d_ssm")
    found = mamba2_of_config(build, inner)
    (groups, heads), (dim, size) = found["heads"], found["dims"]
    norms, first = config.flag("mamba_rms_norm"), not config.flag("mamba_norm_before_gate")
    mixer = mamba2(build, **found, norm=norms)
    groups, heads = build.placement.heads("mamba_n_groups", groups)[0], build.local_size("mamba_n_heads", heads)
    parts = heads * dim, heads * dim, groups * size, groups * size, heads
    by_part, width = torch.tensor(config.numbers("ssm_multipliers", 5, 1.0)), config.size("hidden_size")
    factors = Weight((), (sum(parts),), torch.float32, make=lambda: by_part.repeat_interleave(torch.tensor(parts)))

    def block(i: int, name: str) -> RecurrentBlock:
        plain: Any = mixer(i, name).mixer
        norm, bias = replace(plain.norm, gate_first=first) if norms else plain.norm, config.flag("projectors_bias")
        o = build.linear(f"{name}.out_proj", rows=width, columns=heads * dim, axis=1, bias=bias)
        return RecurrentBlock.around(replace(plain, norm=norm, o=o, factors=factors))

    return block
