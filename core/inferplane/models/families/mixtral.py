"""Mixtral: Mistral with mixtures of experts."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import (
    decoder_model,
    experts_per_token,
    grouped_query_attention,
    mixture_of_experts,
    sliding_window,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, MoE, MoERoute


@architecture(
    "MixtralForCausalLM",
    model_type="mixtral",
    defaults={
        "max_position_embeddings": 2**17,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    aliases={"num_experts": "num_local_experts"},
    expert_names=("block_sparse_moe", "w1", "w3", "w2"),
)
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
    count, inner, parts = "num_local_experts", "intermediate_size", ("w1", "w3", "w2")
    route = MoERoute(None, experts_per_token(build.config, count), "softmax")

    def mlp(i: int, name: str) -> MoE:
        name = name.removesuffix("mlp") + "block_sparse_moe"
        return mixture_of_experts(build, name, route, count=count, inner=inner, parts=parts)

    attention = grouped_query_attention(build, windows=sliding_window(build.config))
    return decoder_model(build, attention, mlp)
