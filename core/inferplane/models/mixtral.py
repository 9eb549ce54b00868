"""Mixtral: Mistral with mixtures of experts."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder, experts, grouped_query, routing, window_of
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, MoE, MoERoute


@architecture("MixtralForCausalLM")
def mixtral(b: Build) -> CausalLM:
    """Mixtral: grouped-query attention, softmax routing renormalized over the chosen experts in every layer.

    Args:
        b: config, placement, formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2401.04088.
    """
    c = b.config
    c.refuse(hidden_act=("silu",))
    window = window_of(c)
    total, chosen = routing(c, "num_local_experts")
    attention, route = grouped_query(b, theta=1e6), MoERoute(None, chosen, "softmax")
    inner = ("intermediate_size", c.size("intermediate_size"))

    def mlp(i: int, name: str) -> MoE:
        name = name.removesuffix("mlp") + "block_sparse_moe"
        return experts(b, name, route, count=("num_local_experts", total), inner=inner, parts=("w1", "w3", "w2"))

    return decoder(b, lambda i, name: attention(name, window), mlp)
