"""Command R7B and Command A."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.cohere import PARALLEL
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
    "Cohere2ForCausalLM",
    model_type="cohere2",
    defaults={
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "attention_bias": False,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
)
def cohere2(build: Build) -> CausalLM:
    """Command A: Command R with windows in three of four layers; the others do not rotate.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2504.00698.
    """
    config, bias = build.config, build.config.flag("attention_bias")
    pattern = config.size("sliding_window_pattern")
    windows = layer_windows(config, lambda i: (i + 1) % pattern != 0)
    rope = rotation(build, head_size(config), interleaved=True)
    ropes = rotate_some(rope, [window is not None for window in windows] or [False] * config.size("num_hidden_layers"))
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, windows=windows, ropes=ropes)
    return decoder_model(build, attention, dense_mlp(build), PARALLEL, logit_factor=config.factor("logit_scale"))
