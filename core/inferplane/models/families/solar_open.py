"""Solar Open."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import (
    decoder_model,
    fine_grained_experts,
    grouped_query_attention,
    head_size,
    rotate_all,
    rotation,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "SolarOpenForCausalLM",
    model_type="solar_open",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    aliases={"num_local_experts": "n_routed_experts"},
)
def solar_open(build: Build) -> CausalLM:
    """Solar Open: grouped-query attention; DeepSeek-V3's routing and shared experts in every layer.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Solar Open technical report (Upstage, 2026).
    """
    bias, ropes = build.config.flag("attention_bias"), rotation(build, head_size(build.config), partial=True)
    attention = grouped_query_attention(build, bias=bias, ropes=rotate_all(build, ropes))
    return decoder_model(build, attention, fine_grained_experts(build, lambda i: True))
