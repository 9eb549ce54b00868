"""DeepSeek-V2 and V2-Lite."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, dense_mlp, experts_per_token, latent_attention, mixture_of_experts
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE, MoERoute


@architecture("DeepseekV2ForCausalLM")
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
        norm_topk_prob=(False,),
        moe_layer_freq=(1,),
        attention_bias=(False,),
        mlp_bias=(False,),
    )
    grouped = config.get("topk_method") == "group_limited_greedy"
    groups, top_groups = (config.size("n_group"), config.size("topk_group")) if grouped else (1, 1)
    chosen = experts_per_token(config, "n_routed_experts", groups, top_groups)
    factor = config.number("routed_scaling_factor", 1.0)
    route = MoERoute(None, chosen, "softmax", groups, top_groups, "max", False, factor)
    mlp, first, shared = dense_mlp(build), config.count("first_k_dense_replace"), config.count("n_shared_experts")

    def feed_forward(i: int, name: str) -> GatedMLP | MoE:
        if i < first:
            return mlp(i, name)
        return mixture_of_experts(build, name, route, count="n_routed_experts", shared=shared)

    return decoder_model(build, latent_attention(build), feed_forward)
