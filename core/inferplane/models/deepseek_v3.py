"""DeepSeek-V3 and R1: latent attention, fine-grained experts, multi-token prediction."""

from __future__ import annotations

from dataclasses import replace

import torch

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.parts import decoder, decoder_layer, dense, experts, latent, routing
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, LMHead, MoE, MoERoute, MTPLayer
from inferplane.types import Weight


@architecture("DeepseekV3ForCausalLM")
def deepseek_v3(b: Build) -> CausalLM:
    """DeepSeek-V3: MLA with and without a low-rank query, sigmoid routing with a correction bias and groups, shared
    experts, first dense layers, YaRN; with `b.mtp` also its multi-token-prediction layers.

    Args:
        b: config, placement, formats. Weights are named as in the published checkpoints, FP8 blocks accepted.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2412.19437; latent attention: arXiv 2405.04434.
    """
    c = b.config
    c.refuse(
        hidden_act=("silu",),
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
        moe_layer_freq=(1,),
        attention_bias=(False,),
    )
    width, layers, first = c.size("hidden_size"), c.size("num_hidden_layers"), c.count("first_k_dense_replace")
    attention, mlp, size = latent(b), dense(b), c.size("moe_intermediate_size")
    route, inner = _routing(b), ("moe_intermediate_size", size)
    total, shared = c.size("n_routed_experts"), c.count("n_shared_experts")

    def feed_forward(i: int, name: str) -> GatedMLP | MoE:
        if i < first:
            return mlp(i, name)
        bias = Weight((f"{name}.gate.e_score_correction_bias",), (total,), torch.float32)
        both = b.mlp(f"{name}.shared_experts", shared * size, width, inner[0]) if shared else None
        return experts(b, name, replace(route, bias=bias), count=("n_routed_experts", total), inner=inner, shared=both)

    model = decoder(b, lambda i, name: attention(name), feed_forward)

    def mtp(i: int) -> MTPLayer:
        p = f"model.layers.{i}"
        return MTPLayer(
            embed=model.embed,  # published checkpoints repeat the embedding and the head; they are the main model's own
            enorm=b.rms(f"{p}.enorm", width),
            hnorm=b.rms(f"{p}.hnorm", width),
            eh_proj=b.linear(f"{p}.eh_proj", rows=width, columns=2 * width),
            layer=decoder_layer(b, i, attention(f"{p}.self_attn"), feed_forward(i, f"{p}.mlp")),
            norm=b.add_rms(f"{p}.shared_head.norm", width),
            head=LMHead(model.head.weight),
        )

    extra = c.count("num_nextn_predict_layers")
    for k in range(extra):
        unread = ("embed_tokens.weight", "shared_head.head.weight") if b.mtp else ("*",)
        b.ignore(*(f"model.layers.{layers + k}.{name}" for name in unread))
    return replace(model, mtp=tuple(mtp(layers + k) for k in range(extra))) if b.mtp else model


def _routing(b: Build) -> MoERoute:
    """How experts are chosen, but for each layer's own correction bias."""
    c = b.config
    groups, kept = c.size("n_group", 1), c.size("topk_group", 1)
    total, chosen = routing(c, "n_routed_experts", groups, kept)
    if groups > 1 and total // groups < 2:
        raise CheckpointError(
            f"{c.name}: n_group = {groups} leaves {total // groups} expert a group, and a group is scored by its best "
            "two.",
            remedy="correct the entries, or fetch the file again",
        )
    renormalize, factor = c.flag("norm_topk_prob", True), c.number("routed_scaling_factor", 1.0)
    return MoERoute(None, chosen, "sigmoid", groups, kept, "top2", renormalize, factor)
