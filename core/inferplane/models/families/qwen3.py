"""Qwen 3, dense."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.qwen2 import DEFAULTS
from inferplane.models.parts import decoder_model, dense_mlp, grouped_query_attention, layer_windows
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture("Qwen3ForCausalLM", model_type="qwen3", defaults={**DEFAULTS, "head_dim": 128, "attention_bias": False})
def qwen3(build: Build) -> CausalLM:
    """Qwen 3: Llama with norms on each head's q and k; some layers may attend to a window.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2505.09388.
    """
    build.config.need("head_dim")  # heads are wider than hidden_size / heads in the published models: never guess
    bias, windows = build.config.flag("attention_bias"), layer_windows(build.config)
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, norms=True, windows=windows)
    return decoder_model(build, attention, dense_mlp(build))
