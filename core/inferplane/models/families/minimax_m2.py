"""MiniMax M2."""

from __future__ import annotations

from dataclasses import replace

import torch

from inferplane.models.build import Build
from inferplane.models.parts import (
    HeadNorms,
    decoder_model,
    experts_per_token,
    grouped_query_attention,
    head_size,
    mixture_of_experts,
    rotate_all,
    rotation,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, MoE, MoERoute
from inferplane.types import Weight


@architecture(
    "MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    defaults={
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5000000.0,
    },
    aliases={"num_experts": "num_local_experts"},
    expert_names=("block_sparse_moe", "w1", "w3", "w2"),
)
def minimax_m2(build: Build) -> CausalLM:
    """MiniMax M2: norms over the width of all heads of q and of k, rotation of a share of each head; sigmoid routing
    with a correction bias in every layer.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: MiniMax-M2 (MiniMax, 2025); the checkpoint's own modeling file.
    """
    config = build.config
    config.refuse(scoring_func=("sigmoid",), use_qk_norm=(True,), qk_norm_type=("per_layer",), use_routing_bias=(True,))
    config.refuse(shared_intermediate_size=(0,))
    count, inner, parts = "num_local_experts", "intermediate_size", ("w1", "w3", "w2")
    total, route = config.size(count), MoERoute(None, experts_per_token(config, count), "sigmoid")
    dim, settings = head_size(config), config.rope
    if config.get("rotary_dim") is not None:
        settings.setdefault("partial_rotary_factor", config.size("rotary_dim") / dim)

    def mlp(i: int, name: str) -> MoE:
        name = name.removesuffix("mlp") + "block_sparse_moe"
        bias = Weight((f"{name}.e_score_correction_bias",), (total,), torch.float32)
        return mixture_of_experts(build, name, replace(route, bias=bias), count=count, inner=inner, parts=parts)

    ropes = rotate_all(build, rotation(build, dim, partial=True, settings=settings))
    return decoder_model(build, grouped_query_attention(build, norms=HeadNorms("width"), ropes=ropes), mlp)
