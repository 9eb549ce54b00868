"""Llama 2, 3.x and the models built like them."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder, dense, grouped_query
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture("LlamaForCausalLM")
def llama(b: Build) -> CausalLM:
    """Llama: grouped-query attention, rotary positions, gated MLP.

    Args:
        b: config, placement, formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2302.13971, arXiv 2407.21783.
    """
    c = b.config
    c.refuse(hidden_act=("silu",), mlp_bias=(False,))
    bias = c.flag("attention_bias")
    attention = grouped_query(b, bias=bias, out_bias=bias)
    b.ignore("model.layers.*.self_attn.rotary_emb.inv_freq")  # older exports wrote this table, which the config implies
    return decoder(b, lambda i, name: attention(name, None), dense(b))
