"""Qwen 2 and 2.5."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, dense_mlp, grouped_query_attention, layer_windows
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM

WINDOWS = {"use_sliding_window": False, "sliding_window": 4096}
DEFAULTS = {**WINDOWS, "max_position_embeddings": 32768, "num_key_value_heads": 32, "max_window_layers": 28}
"""Of entries that a config leaves out; Qwen 3 has the same."""


@architecture("Qwen2ForCausalLM", model_type="qwen2", defaults=DEFAULTS)
def qwen2(build: Build) -> CausalLM:
    """Qwen 2 and 2.5: Llama with biases on q, k and v; some layers may attend to a window.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2407.10671, arXiv 2412.15115.
    """
    build.config.refuse(use_mrope=(False,))
    attention = grouped_query_attention(build, bias=True, windows=layer_windows(build.config))
    return decoder_model(build, attention, dense_mlp(build))
