"""Qwen 2 and 2.5."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder, dense, grouped_query, layer_windows
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture("Qwen2ForCausalLM")
def qwen2(b: Build) -> CausalLM:
    """Qwen 2 and 2.5: Llama with biases on q, k and v; some layers may attend to a window.

    Args:
        b: config, placement, formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2407.10671, arXiv 2412.15115.
    """
    b.config.refuse(hidden_act=("silu",), use_mrope=(False,))
    attention, windows = grouped_query(b, bias=True), layer_windows(b.config)
    return decoder(b, lambda i, name: attention(name, windows[i]), dense(b))
