"""Mistral 7B and the dense models built like it."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder, dense, grouped_query, window_of
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture("MistralForCausalLM")
def mistral(b: Build) -> CausalLM:
    """Mistral: Llama whose layers all attend to a window, where the config states one.

    Args:
        b: config, placement, formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2310.06825.
    """
    c = b.config
    c.refuse(hidden_act=("silu",), layer_types=())
    attention, window = grouped_query(b), window_of(c)
    return decoder(b, lambda i, name: attention(name, window), dense(b))
