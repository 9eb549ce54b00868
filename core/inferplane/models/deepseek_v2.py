"""DeepSeek-V2 and V2-Lite."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import decoder, dense, experts, latent, routing
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE, MoERoute


@architecture("DeepseekV2ForCausalLM")
def deepseek_v2(b: Build) -> CausalLM:
    """DeepSeek-V2: latent attention with and without a low-rank query; softmax routing, over all experts ("greedy",
    as in V2-Lite) or over the best groups; shared experts, first dense layers, YaRN.

    Args:
        b: config, placement, formats. Weights are named as in the published checkpoints.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2405.04434.
    """
    c = b.config
    c.refuse(
        hidden_act=("silu",),
        scoring_func=("softmax",),
        topk_method=("greedy", "group_limited_greedy"),
        norm_topk_prob=(False,),
        moe_layer_freq=(1,),
        attention_bias=(False,),
        mlp_bias=(False,),
    )
    grouped = c.get("topk_method") == "group_limited_greedy"
    groups, kept = (c.size("n_group"), c.size("topk_group")) if grouped else (1, 1)
    total, chosen = routing(c, "n_routed_experts", groups, kept)
    factor = c.number("routed_scaling_factor", 1.0)
    route = MoERoute(None, chosen, "softmax", groups, kept, "max", False, factor)
    attention, mlp, size = latent(b), dense(b), c.size("moe_intermediate_size")
    inner = ("moe_intermediate_size", size)
    first, shared = c.count("first_k_dense_replace"), c.count("n_shared_experts")

    def feed_forward(i: int, name: str) -> GatedMLP | MoE:
        if i < first:
            return mlp(i, name)
        both = b.mlp(f"{name}.shared_experts", shared * size, c.size("hidden_size"), inner[0]) if shared else None
        return experts(b, name, route, count=("n_routed_experts", total), inner=inner, shared=both)

    return decoder(b, lambda i, name: attention(name), feed_forward)
