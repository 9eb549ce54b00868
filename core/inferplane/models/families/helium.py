"""Helium."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, dense_mlp, grouped_query_attention
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "HeliumForCausalLM",
    model_type="helium",
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
)
def helium(build: Build) -> CausalLM:
    """Helium: Llama with rotation of adjacent entries.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Helium 1 (Kyutai, 2025).
    """
    bias = build.config.flag("attention_bias")
    attention = grouped_query_attention(build, bias=bias, interleaved=True)
    return decoder_model(build, attention, dense_mlp(build, bias=build.config.flag("mlp_bias")))
