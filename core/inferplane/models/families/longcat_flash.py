"""LongCat Flash."""

from __future__ import annotations

from dataclasses import replace

import torch

from inferplane.models.build import Build
from inferplane.models.parts import (
    LAYERS,
    dense_mlp,
    experts_per_token,
    latent_attention,
    mixture_of_experts,
    model_around,
)
from inferplane.models.reading.config import Config
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, MoE, MoERoute, ShortcutLayer
from inferplane.types import Weight

COUNT, ALL = "n_routed_experts", "n_routed_experts + zero_expert_num"


@architecture(
    "LongcatFlashForCausalLM",
    model_type="longcat_flash",
    defaults={
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0, "attention_bias": False,
        "q_lora_rank": 1536, "zero_expert_num": 256, "routed_scaling_factor": 6.0,
    },
    aliases={
        "num_local_experts": COUNT, "moe_topk": "num_experts_per_tok", "ffn_hidden_size": "intermediate_size",
        "expert_ffn_hidden_size": "moe_intermediate_size",
    },
)  # fmt: skip
def longcat_flash(build: Build) -> CausalLM:
    """LongCat Flash: each layer has two halves of latent attention and an MLP; experts beside the first half's MLP,
    some of which return what they read, are added behind the second; factors on queries and latents. Layers for
    multi-token prediction are not read.

    Args:
        build: config, placement and weight formats. Weights are named as in the published checkpoints.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: LongCat-Flash, arXiv 2509.01322.
    """
    layers, identities = build.config.size("num_layers"), build.config.count("zero_expert_num")
    more = {LAYERS: 2 * layers, ALL: build.config.size(COUNT) + identities}
    build = replace(build, config=Config({**build.config, **more}, build.config.name))
    config = build.config
    config.refuse(attention_method=("MLA",), zero_expert_type=("identity",), router_bias=(False,))
    config.refuse(mla_scale_q_lora=(True,), mla_scale_kv_lora=(True,))
    build.ignore("model.mtp.*")
    width, ranks = config.size("hidden_size"), (config.size("q_lora_rank"), config.size("kv_lora_rank"))
    attention = latent_attention(build, factors=((width / ranks[0]) ** 0.5, (width / ranks[1]) ** 0.5))
    factor, chosen = config.factor("routed_scaling_factor"), experts_per_token(config, ALL)
    route, feed_forward = MoERoute(None, chosen, "softmax", renormalize=False, factor=factor), dense_mlp(build)

    def experts(name: str) -> MoE:
        bias = Weight((f"{name}.router.e_score_correction_bias",), (config.size(ALL),), torch.float32)
        own, router = replace(route, bias=bias), "router.classifier"
        return mixture_of_experts(build, name, own, count=COUNT, router=router, identities=identities)

    def make_layer(i: int) -> ShortcutLayer:
        number, k = divmod(i, 2)
        name = f"model.layers.{number}"
        attn, mlp = attention(i, f"{name}.self_attn.{k}"), feed_forward(i, f"{name}.mlps.{k}")
        norms = [
            build.add_rms_norm(f"{name}.{norm}.{k}", width) for norm in ("input_layernorm", "post_attention_layernorm")
        ]
        return ShortcutLayer(norms[0], attn, norms[1], mlp, None if k else experts(f"{name}.mlp"))

    return model_around(build, [make_layer(i) for i in range(2 * layers)])
