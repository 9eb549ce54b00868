"""Kimi Linear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.parts import (
    LAYERS,
    decoder_model,
    fine_grained_experts,
    kimi_delta_attention,
    latent_attention,
    layer_kinds,
)
from inferplane.models.reading.config import Config
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM

KINDS = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
"""Entries of `linear_attn_config` with numbers of layers, from 1 -> the kind of these layers."""
SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Entries of `linear_attn_config` -> what transformers calls them."""


@architecture(
    "KimiLinearForCausalLM",
    model_type="kimi_linear",
    defaults={
        "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "attention_bias": False, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.446,
        "linear_conv_kernel_dim": 4, "first_k_dense_replace": 1,
    },
    aliases={
        "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group", "num_experts": "num_local_experts", "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
    },
    renames={
        r"\.forget_gate\.": ".", r"\.block_sparse_moe\.": ".mlp.",
        r"(\.experts\.\d+)\.w1\.": r"\1.gate_proj.", r"(\.experts\.\d+)\.w3\.": r"\1.up_proj.",
        r"(\.experts\.\d+)\.w2\.": r"\1.down_proj.",
    },
    splits={"conv1d": ("q_conv1d", "k_conv1d", "v_conv1d")},
)  # fmt: skip
def kimi_linear(build: Build) -> CausalLM:
    """Kimi Linear: Kimi Delta Attention in most layers, latent attention without rotary positions in the others;
    sigmoid routing with a correction bias and groups, shared experts, first dense layers.

    Args:
        build: config, placement and weight formats. Weights are named as in the published checkpoints, or as
            transformers names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2510.26692.
    """
    config = _take_linear_part(build.config)
    config.refuse(moe_router_activation_func=("sigmoid",), mla_use_nope=(True,), moe_layer_freq=(1,))
    config.refuse(num_nextn_predict_layers=(0,))
    build = replace(build, config=config)
    layers = config.size(LAYERS)
    left_out = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)]
    kinds = layer_kinds(config, ("linear_attention", "full_attention"), left_out)
    first = config.count("first_k_dense_replace")
    left_out = ["dense" if i < first else "sparse" for i in range(layers)]
    blocks = layer_kinds(config, ("dense", "sparse"), left_out, "mlp_layer_types")
    attention, recurrence = latent_attention(build, rotates=False), kimi_delta_attention(build)

    def mix(i: int, name: str) -> Any:
        return attention(i, name) if kinds[i] == "full_attention" else recurrence(i, name)

    return decoder_model(build, mix, fine_grained_experts(build, lambda i: blocks[i] == "sparse"))


def _take_linear_part(config: Config) -> Config:
    """The config with the entries of `linear_attn_config`, as published checkpoints have it, among its own."""
    part = config.get("linear_attn_config")
    if part is None:
        return config
    lists: list[Any] = [part.get(key) or [] for key in KINDS] if isinstance(part, Mapping) else [None]
    if not all(isinstance(found, list) and all(isinstance(number, int) for number in found) for found in lists):
        raise CheckpointError(
            f"{config.name}: linear_attn_config is not an object whose layers are lists of numbers.",
            remedy="correct the entry, or fetch the file again",
        )
    found = {name: part[key] for key, name in SIZES.items() if part.get(key) is not None}
    kinds = {number: kind for kind, numbers in zip(KINDS.values(), lists) for number in numbers}
    if kinds and config.get("layer_types") is None:
        found["layer_types"] = [kinds.get(i + 1) for i in range(config.size(LAYERS))]
    return Config({**config, **found}, config.name)
