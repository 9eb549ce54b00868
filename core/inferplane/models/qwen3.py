"""Qwen 3, dense."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder, dense, grouped_query, layer_windows
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture("Qwen3ForCausalLM")
def qwen3(b: Build) -> CausalLM:
    """Qwen 3: Llama with norms on each head's q and k; some layers may attend to a window.

    Args:
        b: config, placement, formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2505.09388.
    """
    b.config.refuse(hidden_act=("silu",))
    b.config.need("head_dim")  # heads are wider than hidden_size / heads in the published models: never guess
    bias = b.config.flag("attention_bias")
    attention, windows = grouped_query(b, bias=bias, out_bias=bias, norms=True), layer_windows(b.config)
    return decoder(b, lambda i, name: attention(name, windows[i]), dense(b))
