"""Seed-OSS."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, dense_mlp, grouped_query_attention
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "SeedOssForCausalLM",
    model_type="seed_oss",
    defaults={
        "max_position_embeddings": 524288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
)
def seed_oss(build: Build) -> CausalLM:
    """Seed-OSS: Llama with biases on q, k and v.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Seed-OSS (ByteDance, 2025).
    """
    config = build.config
    bias, out_bias = config.flag("attention_bias"), config.flag("attention_out_bias")
    attention = grouped_query_attention(build, bias=bias, out_bias=out_bias)
    return decoder_model(build, attention, dense_mlp(build, bias=config.flag("mlp_bias")))
