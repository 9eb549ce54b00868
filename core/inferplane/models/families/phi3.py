"""Phi-3 and Phi-4."""

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
    sliding_window,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Phi3ForCausalLM",
    model_type="phi3",
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    is_fused=True,
)
def phi3(build: Build) -> CausalLM:
    """Phi-3 and Phi-4: Llama with q, k and v, and gate and up, each stored as one; a share of each head is rotated;
    LongRoPE.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2404.14219, arXiv 2412.08905.
    """
    config = build.config
    config.check("rope_type", config.rope["rope_type"], ("default", "longrope"))
    fused = needs_stored_parts(build)
    attention = grouped_query_attention(
        build,
        windows=sliding_window(config),
        ropes=rotate_all(build, rotation(build, head_size(config), partial=True)),
        qkv=("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj"),
    )
    return decoder_model(build, attention, dense_mlp(build, fused=fused))
