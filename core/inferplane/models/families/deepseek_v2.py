"""DeepSeek-V2 and V2-Lite."""

from __future__ import annotations

from inferplane.errors import warn
from inferplane.models.build import Build
from inferplane.models.parts import (
    SharedExperts,
    decoder_model,
    dense_mlp,
    experts_per_token,
    latent_attention,
    mixture_of_experts,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE, MoERoute


@architecture(
    "DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    defaults={
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "q_lora_rank": 1536,
    },
    aliases={"num_experts": "n_routed_experts"},
)
def deepseek_v2(build: Build) -> CausalLM:
    """DeepSeek-V2: latent attention with and without a low-rank query; softmax routing, over all experts ("greedy",
    as in V2-Lite) or over the best groups; shared experts, first dense layers, YaRN.

    Args:
        build: config, placement and weight formats. Weights are named as in the published checkpoints.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2405.04434.
    """
    config = build.config
    config.refuse(
        scoring_func=("softmax",),
        topk_method=("greedy", "group_limited_greedy"),
        moe_layer_freq=(1,),
    )
    if config.flag("norm_topk_prob"):
        warn(f"{config.name}: norm_topk_prob is not applied in this family, as in transformers.")
    grouped = config.get("topk_method") == "group_limited_greedy"
    groups, top_groups = (config.size("n_group"), config.size("topk_group")) if grouped else (1, 1)
    chosen = experts_per_token(config, "n_routed_experts", groups, top_groups)
    factor, bias = config.factor("routed_scaling_factor"), config.flag("mlp_bias")
    route = MoERoute(None, chosen, "softmax", groups, top_groups, "max", False, factor)
    mlp, first = dense_mlp(build, bias=bias), config.count("first_k_dense_replace")
    shared = SharedExperts(config.count("n_shared_experts") * config.size("moe_intermediate_size"), bias=bias)

    def feed_forward(i: int, name: str) -> GatedMLP | MoE:
        if i < first:
            return mlp(i, name)
        return mixture_of_experts(build, name, route, count="n_routed_experts", shared=shared)

    return decoder_model(build, latent_attention(build), feed_forward)
