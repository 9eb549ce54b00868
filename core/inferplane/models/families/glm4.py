"""GLM-4 of 2025 (GLM-4-0414, GLM-Z1)."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.glm import DEFAULTS
from inferplane.models.parts import (
    LayerForm,
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


@architecture(
    "Glm4ForCausalLM",
    model_type="glm4",
    defaults=DEFAULTS,
    is_fused=True,
)
def glm4(build: Build) -> CausalLM:
    """GLM-4-0414: GLM-4 with norms on both sides of each block.

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
    form = LayerForm(after=("post_self_attn_layernorm", "post_mlp_layernorm"))
    return decoder_model(build, attention, dense_mlp(build, fused=needs_stored_parts(build)), form)
