"""Hunyuan 3 (Hy3)."""

from __future__ import annotations

from dataclasses import replace

import torch

from inferplane.models.build import Build
from inferplane.models.parts import (
    LAYERS,
    SharedExperts,
    decoder_model,
    dense_mlp,
    experts_per_token,
    grouped_query_attention,
    layer_kinds,
    mixture_of_experts,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE, MoERoute
from inferplane.types import Weight

COUNT = "num_experts"


@architecture(
    "HYV3ForCausalLM",
    model_type="hy_v3",
    defaults={
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0, "head_dim": 128,
        "num_key_value_heads": 8, "attention_bias": False, "mlp_bias": False, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "router_scaling_factor": 2.826,
    },
    aliases={"num_local_experts": COUNT},
    renames={
        r"\.mlp\.router\.gate\.": ".mlp.gate.", r"\.mlp\.shared_mlp\.": ".mlp.shared_experts.",
        r"\.mlp\.expert_bias$": ".mlp.e_score_correction_bias",
    },
)  # fmt: skip
def hy_v3(build: Build) -> CausalLM:
    """Hunyuan 3: norms on each head's q and k, sigmoid routing with a correction bias, shared experts, a first dense
    layer. Layers for multi-token prediction are not read.

    Args:
        build: config, placement and weight formats. Weights are named as in the published checkpoints, or as
            transformers names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: transformers' HYV3Config (Tencent, 2026).
    """
    config = build.config
    config.refuse(moe_router_use_sigmoid=(True,), route_norm=(True,), qk_norm=(True,))
    layers, bias = config.size(LAYERS), config.flag("attention_bias")
    build.ignore(*(f"model.layers.{layers + k}.*" for k in range(config.count("num_nextn_predict_layers") or 1)))
    left_out = ["dense"] + ["sparse"] * (layers - 1)
    blocks = layer_kinds(config, ("dense", "sparse"), left_out, "mlp_layer_types")
    route = MoERoute(None, experts_per_token(config, COUNT), "sigmoid", factor=config.factor("router_scaling_factor"))
    shared = SharedExperts(
        config.size("num_shared_experts") * config.size("moe_intermediate_size"), bias=config.flag("mlp_bias")
    )
    dense, total = dense_mlp(build, bias=shared.bias), config.size(COUNT)

    def mlp(i: int, name: str) -> GatedMLP | MoE:
        if blocks[i] == "dense":
            return dense(i, name)
        correction = Weight((f"{name}.e_score_correction_bias",), (total,), torch.float32)
        return mixture_of_experts(build, name, replace(route, bias=correction), count=COUNT, shared=shared)

    return decoder_model(build, grouped_query_attention(build, bias=bias, out_bias=bias, norms=True), mlp)
