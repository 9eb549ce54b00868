"""EXAONE 4."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.olmo2 import AFTER
from inferplane.models.parts import (
    decoder_model,
    dense_mlp,
    grouped_query_attention,
    head_size,
    layer_windows,
    rotate_some,
    rotation,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "Exaone4ForCausalLM",
    model_type="exaone4",
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
)
def exaone4(build: Build) -> CausalLM:
    """EXAONE 4: norms on what attention and MLP return, and on each head's q and k; where layers with windows are mixed
    with others, only those with windows rotate.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2507.11407.
    """
    config = build.config
    windows = layer_windows(config, lambda i: (i + 1) % config.size("sliding_window_pattern") != 0)
    rope = rotation(build, head_size(config))
    ropes = rotate_some(rope, [window is not None for window in windows] or [True] * config.size("num_hidden_layers"))
    attention = grouped_query_attention(build, norms=True, windows=windows, ropes=ropes)
    return decoder_model(build, attention, dense_mlp(build), AFTER)
