"""DeepSeek-V3 and R1: latent attention, fine-grained experts, multi-token prediction."""

from __future__ import annotations

from dataclasses import replace

import torch

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.config import Config
from inferplane.models.rope import mscale
from inferplane.ops import (
    CausalLM,
    DecoderLayer,
    GatedMLP,
    Linear,
    LMHead,
    MLAAbsorbed,
    MLABlock,
    MLADims,
    MLAExpanded,
    MLAKVWrite,
    MoE,
    MoEExperts,
    MoERoute,
    MTPLayer,
    Rope,
)
from inferplane.types import Weight

LATENT_EPS = 1e-6
"""Epsilon of the norms on the latents, whatever `rms_norm_eps` says: so in the modeling file that is published with the
checkpoints, and in transformers."""


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
    width, vocab = c.size("hidden_size"), c.size("vocab_size")
    layers, dense = c.size("num_hidden_layers"), c.count("first_k_dense_replace")
    d = MLADims(
        heads=b.share("num_attention_heads", c.size("num_attention_heads")),
        nope=c.size("qk_nope_head_dim"),
        rope=c.size("qk_rope_head_dim"),
        value=c.size("v_head_dim"),
        latent=c.size("kv_lora_rank"),
    )
    rank = c.count("q_lora_rank")
    scale = (d.nope + d.rope) ** -0.5
    rope = Rope(b.rope(d.rope), bool(c.get("rope_interleave", True)))  # checks the settings
    settings = c.rope
    if settings["rope_type"] != "default" and settings.get("mscale_all_dim"):
        scale *= mscale(settings["factor"], settings["mscale_all_dim"]) ** 2
    experts, chosen, groups = c.size("n_routed_experts"), c.size("num_experts_per_tok"), c.size("n_group", 1)
    _check_routing(c, experts, chosen, groups)

    def mla(name: str) -> MLABlock:
        q_rows = d.heads * (d.nope + d.rope)
        kv_b = b.weight((f"{name}.kv_b_proj",), (d.heads * (d.nope + d.value), d.latent), 0)
        if rank:
            q_b = b.linear(f"{name}.q_b_proj", rows=q_rows, columns=rank, axis=0)
        else:
            q_b = b.linear(f"{name}.q_proj", rows=q_rows, columns=width, axis=0)
        return MLABlock(
            q_a=b.linear(f"{name}.q_a_proj", rows=rank, columns=width) if rank else None,
            q_a_norm=b.rms(f"{name}.q_a_layernorm", rank, LATENT_EPS) if rank else None,
            q_b=q_b,
            kv_a=b.linear(f"{name}.kv_a_proj_with_mqa", rows=d.latent + d.rope, columns=width),
            kv_a_norm=b.rms(f"{name}.kv_a_layernorm", d.latent, LATENT_EPS),
            rope=rope,
            expanded=MLAExpanded(Linear(kv_b), d, scale, d.request),
            absorbed=MLAAbsorbed(kv_b, d, scale, d.request),
            write=MLAKVWrite(d.request),
            o=b.linear(f"{name}.o_proj", rows=width, columns=d.heads * d.value, axis=1),
            dims=d,
            reduce=b.reduce(),
        )

    def shared_mlp(name: str, inner: int) -> GatedMLP:
        return replace(b.mlp(name, inner, width), reduce=None)  # summed over ranks once, with the routed experts

    def moe(name: str) -> MoE:
        inner = b.share("moe_intermediate_size", c.size("moe_intermediate_size"))
        shared = c.count("n_shared_experts")
        bias = Weight((f"{name}.gate.e_score_correction_bias",), (experts,), torch.float32)
        gate_up = [f"{name}.experts.{e}.{part}" for e in range(experts) for part in ("gate_proj", "up_proj")]
        down = [f"{name}.experts.{e}.down_proj" for e in range(experts)]
        return MoE(
            router=b.router(f"{name}.gate", experts, width),
            route=MoERoute(
                bias,
                top_k=chosen,
                score="sigmoid",
                groups=groups,
                top_groups=c.size("topk_group", 1),
                group_score="top2",
                renormalize=bool(c.get("norm_topk_prob", True)),
                factor=c.number("routed_scaling_factor", 1.0),
            ),
            experts=MoEExperts(
                b.weight(gate_up, (experts, 2 * inner, width), 0), b.weight(down, (experts, width, inner), 1)
            ),
            shared=shared_mlp(f"{name}.shared_experts", shared * c.size("moe_intermediate_size")) if shared else None,
            reduce=b.reduce(),
        )

    def layer(i: int) -> DecoderLayer:
        p = f"model.layers.{i}"
        return DecoderLayer(
            attn_norm=b.add_rms(f"{p}.input_layernorm", width),
            attn=mla(f"{p}.self_attn"),
            mlp_norm=b.add_rms(f"{p}.post_attention_layernorm", width),
            mlp=b.mlp(f"{p}.mlp", c.size("intermediate_size"), width) if i < dense else moe(f"{p}.mlp"),
        )

    embed = b.embedding("model.embed_tokens", vocab, width)
    head = b.head(embed, vocab, width)

    def mtp(i: int) -> MTPLayer:
        p = f"model.layers.{i}"
        return MTPLayer(
            embed=embed,  # published checkpoints repeat the embedding and the head; they are the main model's own
            enorm=b.rms(f"{p}.enorm", width),
            hnorm=b.rms(f"{p}.hnorm", width),
            eh_proj=b.linear(f"{p}.eh_proj", rows=width, columns=2 * width),
            layer=layer(i),
            norm=b.add_rms(f"{p}.shared_head.norm", width),
            head=LMHead(head.weight),
        )

    extra = c.count("num_nextn_predict_layers")
    for k in range(extra):
        unread = ("embed_tokens.weight", "shared_head.head.weight") if b.mtp else ("*",)
        b.ignore(*(f"model.layers.{layers + k}.{name}" for name in unread))
    return CausalLM(
        embed=embed,
        layers=tuple(layer(i) for i in range(layers)),
        norm=b.add_rms("model.norm", width),
        head=head,
        mtp=tuple(mtp(layers + k) for k in range(extra if b.mtp else 0)),
    )


def _check_routing(c: Config, experts: int, chosen: int, groups: int) -> None:
    """Raise CheckpointError when no router could choose as the config says."""
    kept = c.size("topk_group", 1)
    each = experts // groups
    what = ""
    if experts % groups:
        what = f"{experts} experts cannot form {groups} equal groups"
    elif groups > 1 and each < 2:
        what = f"n_group = {groups} leaves {each} expert a group, and a group is scored by its best two"
    elif kept > groups:
        what = f"topk_group = {kept} exceeds n_group = {groups}"
    elif chosen > experts:
        what = f"num_experts_per_tok = {chosen} exceeds n_routed_experts = {experts}"
    elif chosen > kept * each:
        what = f"num_experts_per_tok = {chosen} exceeds the {kept * each} experts in topk_group = {kept} groups"
    if what:
        raise CheckpointError(f"{c.name}: {what}.", remedy="correct the entries, or fetch the file again")
