"""Mixtral: Mistral with mixtures of experts."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import (
    decoder_model,
    expert_counts,
    grouped_query_attention,
    mixture_of_experts,
    sliding_window,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, MoE, MoERoute


@architecture("MixtralForCausalLM")
def mixtral(build: Build) -> CausalLM:
    """Mixtral: grouped-query attention, softmax routing renormalized over the chosen experts in every layer.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2401.04088.
    """
    config = build.config
    config.refuse(hidden_act=("silu",))
    window = sliding_window(config)
    total, chosen = expert_counts(config, "num_local_experts")
    attention, route = grouped_query_attention(build, theta=1e6), MoERoute(None, chosen, "softmax")
    inner = ("intermediate_size", config.size("intermediate_size"))

    def mlp(i: int, name: str) -> MoE:
        name = name.removesuffix("mlp") + "block_sparse_moe"
        return mixture_of_experts(
            build, name, route, count=("num_local_experts", total), inner=inner, parts=("w1", "w3", "w2")
        )

    return decoder_model(build, lambda i, name: attention(name, window), mlp)
