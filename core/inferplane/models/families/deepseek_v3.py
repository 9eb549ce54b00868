"""DeepSeek-V3 and R1: latent attention, fine-grained experts, multi-token prediction."""

from __future__ import annotations

from dataclasses import replace

import torch

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.parts import (
    decoder_layer,
    decoder_model,
    dense_mlp,
    experts_per_token,
    latent_attention,
    mixture_of_experts,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, LMHead, MoE, MoERoute, MTPLayer
from inferplane.types import Weight


@architecture("DeepseekV3ForCausalLM")
def deepseek_v3(build: Build) -> CausalLM:
    """DeepSeek-V3: MLA with and without a low-rank query, sigmoid routing with a correction bias and groups, shared
    experts, first dense layers, YaRN; with `build.mtp` also its multi-token-prediction layers.

    Args:
        build: config, placement and weight formats. Weights are named as in the published checkpoints; FP8 blocks are
            accepted.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2412.19437; latent attention: arXiv 2405.04434.
    """
    config = build.config
    config.refuse(
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
        moe_layer_freq=(1,),
        attention_bias=(False,),
    )
    width, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    first, shared = config.count("first_k_dense_replace"), config.count("n_shared_experts")
    attention, mlp, route = latent_attention(build), dense_mlp(build), _shared_routing(build)
    total = config.size("n_routed_experts")

    def feed_forward(i: int, name: str) -> GatedMLP | MoE:
        if i < first:
            return mlp(i, name)
        bias = Weight((f"{name}.gate.e_score_correction_bias",), (total,), torch.float32)
        return mixture_of_experts(build, name, replace(route, bias=bias), count="n_routed_experts", shared=shared)

    model = decoder_model(build, attention, feed_forward)

    def mtp(i: int) -> MTPLayer:
        prefix = f"model.layers.{i}"
        return MTPLayer(
            embed=model.embed,  # published checkpoints repeat the embedding and the head; they are the main model's own
            enorm=build.rms_norm(f"{prefix}.enorm", width),
            hnorm=build.rms_norm(f"{prefix}.hnorm", width),
            eh_proj=build.linear(f"{prefix}.eh_proj", rows=width, columns=2 * width),
            layer=decoder_layer(build, i, attention(i, f"{prefix}.self_attn"), feed_forward(i, f"{prefix}.mlp")),
            norm=build.add_rms_norm(f"{prefix}.shared_head.norm", width),
            head=LMHead(model.head.weight),
        )

    extra = config.count("num_nextn_predict_layers")
    for k in range(extra):
        unread = ("embed_tokens.weight", "shared_head.head.weight") if build.mtp else ("*",)
        build.ignore(*(f"model.layers.{layers + k}.{name}" for name in unread))
    return replace(model, mtp=tuple(mtp(layers + k) for k in range(extra))) if build.mtp else model


def _shared_routing(build: Build) -> MoERoute:
    """Build the routing that all layers share; each layer adds its own correction bias."""
    config = build.config
    groups, top_groups = config.size("n_group", 1), config.size("topk_group", 1)
    total, chosen = config.size("n_routed_experts"), experts_per_token(config, "n_routed_experts", groups, top_groups)
    if groups > 1 and total // groups < 2:
        raise CheckpointError(
            f"{config.name}: n_group = {groups} leaves {total // groups} expert per group, and a group is scored by "
            "its best two.",
            remedy="correct the entries, or fetch the file again",
        )
    renormalize, factor = config.flag("norm_topk_prob", True), config.number("routed_scaling_factor", 1.0)
    return MoERoute(None, chosen, "sigmoid", groups, top_groups, "top2", renormalize, factor)
