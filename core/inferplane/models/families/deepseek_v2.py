"""DeepSeek-V2 and V2-Lite."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, dense_mlp, expert_counts, latent_attention, mixture_of_experts
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
        hidden_act=("silu",),
        scoring_func=("softmax",),
        topk_method=("greedy", "group_limited_greedy"),
        norm_topk_prob=(False,),
        moe_layer_freq=(1,),
        attention_bias=(False,),
        mlp_bias=(False,),
    )
    grouped = config.get("topk_method") == "group_limited_greedy"
    groups, top_groups = (config.size("n_group"), config.size("topk_group")) if grouped else (1, 1)
    total, chosen = expert_counts(config, "n_routed_experts", groups, top_groups)
    factor = config.number("routed_scaling_factor", 1.0)
    route = MoERoute(None, chosen, "softmax", groups, top_groups, "max", False, factor)
    attention, mlp, size = latent_attention(build), dense_mlp(build), config.size("moe_intermediate_size")
    inner = ("moe_intermediate_size", size)
    first, shared = config.count("first_k_dense_replace"), config.count("n_shared_experts")

    def feed_forward(i: int, name: str) -> GatedMLP | MoE:
        if i < first:
            return mlp(i, name)
        both = (
            build.mlp(f"{name}.shared_experts", shared * size, config.size("hidden_size"), inner[0]) if shared else None
        )
        return mixture_of_experts(build, name, route, count=("n_routed_experts", total), inner=inner, shared=both)

    return decoder_model(build, lambda i, name: attention(name), feed_forward)
