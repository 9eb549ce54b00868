"""GLM-4 of 2024, in the layout of Hugging Face."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import (
    decoder_model,
    dense_mlp,
    grouped_query_attention,
    head_size,
    needs_stored_parts,
    rotate_all,
    rotation,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
"""Of entries that a config leaves out; the models of 2025 have the same."""


@architecture(
    "GlmForCausalLM",
    model_type="glm",
    defaults=DEFAULTS,
    is_fused=True,
)
def glm(build: Build) -> CausalLM:
    """GLM-4 (2024): half of each head is rotated, adjacent entries together; gate and up stored as one.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2406.12793.
    """
    rope = rotation(build, head_size(build.config), interleaved=True, partial=True)
    bias, ropes = build.config.flag("attention_bias"), rotate_all(build, rope)
    attention = grouped_query_attention(build, bias=bias, ropes=ropes)
    return decoder_model(build, attention, dense_mlp(build, fused=needs_stored_parts(build)))
