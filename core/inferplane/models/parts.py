"""What several families are made of: attention by groups and by latents, experts, and the model around the layers.

Names of weights are those of Hugging Face checkpoints, in which these families agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.config import Config
from inferplane.models.rope import mscale
from inferplane.ops import (
    FORMATS,
    Attention,
    CausalLM,
    DecoderLayer,
    GatedMLP,
    GQABlock,
    KVWrite,
    Linear,
    MLAAbsorbed,
    MLABlock,
    MLADims,
    MLAExpanded,
    MLAKVWrite,
    MLANormRopeWrite,
    MoE,
    MoEExperts,
    MoERoute,
    NormRopeWrite,
    Rope,
)
from inferplane.types import STATIC, KVRequest, Shard, Weight

Window = int | None
"""How many last tokens a layer attends to; None: all."""

LATENT_EPS = 1e-6
"""Epsilon of the norms on latents, whatever `rms_norm_eps` says: so in the modeling files that are published with the
DeepSeek checkpoints, and in transformers."""


def grouped_query(
    b: Build, *, bias: bool = False, out_bias: bool = False, norms: bool = False, theta: float = 10000.0
) -> Callable[[str, Window], GQABlock]:
    """Grouped-query attention of a family: a function from a layer's name and window to its block.

    Args:
        b: its config gives heads and sizes.
        bias: biases on q, k and v. out_bias: one on the output.
        norms: norms on each head's q and k.
        theta: rotary base where the config states none.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UsageError: the ranks cannot share the heads.
    """
    c = b.config
    width, heads = c.size("hidden_size"), c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{c.name}: num_attention_heads = {heads} cannot be shared equally by num_key_value_heads = {kv_heads}.",
            remedy="correct the entries, or fetch the file again",
        )
    if c.get("head_dim") is None and width % heads:
        raise CheckpointError(
            f"{c.name}: hidden_size = {width} cannot be divided into num_attention_heads = {heads} equal heads.",
            remedy="correct the entries, or add head_dim",
        )
    dim = c.size("head_dim", width // heads)
    h, (g, kv_shard) = b.share("num_attention_heads", heads), b.placement.heads("num_key_value_heads", kv_heads)
    shards = (Shard(0, b.placement.tp_rank, b.placement.tp_size), kv_shard, kv_shard)
    rope = Rope(b.rope(dim, theta))

    def block(name: str, window: Window = None) -> GQABlock:
        request = KVRequest("gqa", g, dim, dim, window)
        q_norm, k_norm = (b.rms(f"{name}.{part}_norm", dim) if norms else None for part in "qk")
        qkv = [f"{name}.{part}_proj" for part in "qkv"]
        return GQABlock(
            qkv=b.linear(*qkv, rows=(h * dim, g * dim, g * dim), columns=width, axis=0, bias=bias, shards=shards),
            o=b.linear(f"{name}.o_proj", rows=width, columns=h * dim, axis=1, bias=out_bias),
            enter=NormRopeWrite(rope, KVWrite(request), q_norm, k_norm),
            few=Attention(h, dim**-0.5, request, "few"),
            many=Attention(h, dim**-0.5, request, "many"),
            heads=(h, g),
            head_dim=dim,
            reduce=b.reduce(),
        )

    return block


def latent(b: Build) -> Callable[[str], MLABlock]:
    """DeepSeek's latent attention, with and without a low-rank query: a function from a layer's name to its block.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UsageError: the ranks cannot share the heads.
    """
    c = b.config
    width, rank = c.size("hidden_size"), c.count("q_lora_rank")
    d = MLADims(
        heads=b.share("num_attention_heads", c.size("num_attention_heads")),
        nope=c.size("qk_nope_head_dim"),
        rope=c.size("qk_rope_head_dim"),
        value=c.size("v_head_dim"),
        latent=c.size("kv_lora_rank"),
    )
    rope = Rope(b.rope(d.rope), c.flag("rope_interleave", True))  # checks the settings
    settings, scale = c.rope, (d.nope + d.rope) ** -0.5
    if settings["rope_type"] != "default" and settings.get("mscale_all_dim"):
        scale *= mscale(settings["factor"], settings["mscale_all_dim"]) ** 2

    def block(name: str) -> MLABlock:
        q_rows = d.heads * (d.nope + d.rope)
        kv_b = b.weight((f"{name}.kv_b_proj",), (d.heads * (d.nope + d.value), d.latent), 0)
        q_b = f"{name}.q_b_proj" if rank else f"{name}.q_proj"
        q_up = b.linear(q_b, rows=q_rows, columns=rank or width, axis=0)
        q_a_norm = b.rms(f"{name}.q_a_layernorm", rank, LATENT_EPS) if rank else None
        kv_a_norm = b.rms(f"{name}.kv_a_layernorm", d.latent, LATENT_EPS)
        codes = codes_for(q_up.weight) if rank else {}
        return MLABlock(
            q_a=b.linear(f"{name}.q_a_proj", rows=rank, columns=width) if rank else None,
            q_b=q_up,
            kv_a=b.linear(f"{name}.kv_a_proj_with_mqa", rows=d.latent + d.rope, columns=width),
            enter=MLANormRopeWrite(q_a_norm, kv_a_norm, rope, MLAKVWrite(d.request), d, **codes),
            rope=rope,
            expanded=MLAExpanded(Linear(kv_b), d, scale, d.request),
            absorbed=MLAAbsorbed(kv_b, d, scale, d.request),
            o=b.linear(f"{name}.o_proj", rows=width, columns=d.heads * d.value, axis=1),
            dims=d,
            reduce=b.reduce(),
        )

    return block


def experts(
    b: Build,
    name: str,
    route: MoERoute,
    *,
    count: tuple[str, int],
    inner: tuple[str, int],
    shared: GatedMLP | None = None,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> MoE:
    """A mixture-of-experts layer with its router at `name.gate`.

    Args:
        b: its config gives the width.
        name: the layer's MLP.
        route: how experts are chosen.
        count: the config's entry for the number of experts, and the number.
        inner: the config's entry for the size of one expert, and the size.
        shared: an MLP for every token; its own sum over ranks is left to the layer's.
        parts: what a checkpoint calls gate, up and down.
    """
    width, (entry, size) = b.config.size("hidden_size"), inner
    mine = b.placement.experts(*count)
    divided = len(mine) == count[1]  # every expert is here, and divided, or some are here, whole
    rows = b.share(entry, size) if divided else size
    gate, up, down = parts
    if not divided:
        b.ignore(f"{name}.experts.*")  # those of the other ranks
    gate_up = [f"{name}.experts.{e}.{part}" for e in mine for part in (gate, up)]
    downs = [f"{name}.experts.{e}.{down}" for e in mine]
    return MoE(
        router=b.router(f"{name}.gate", count[1], width),
        route=route,
        experts=MoEExperts(
            b.weight(gate_up, (len(mine), 2 * rows, width), 0 if divided else None),
            b.weight(downs, (len(mine), width, rows), 1 if divided else None),
            partial=not divided,
        ),
        shared=None if shared is None else replace(shared, reduce=None),
        reduce=b.reduce(),
        here=None if divided else (mine[0], len(mine)),
    )


def routing(c: Config, entry: str, groups: int = 1, kept: int = 1) -> tuple[int, int]:
    """Experts in all, and experts a token.

    Args:
        c: the config.
        entry: its entry for the number of experts.
        groups: groups they form. kept: groups a token may choose from.

    Raises:
        CheckpointError: no router could choose as the config says.
    """
    total, chosen = c.size(entry), c.size("num_experts_per_tok")
    each = total // groups
    what = ""
    if total % groups:
        what = f"{total} experts cannot form {groups} equal groups"
    elif kept > groups:
        what = f"topk_group = {kept} exceeds n_group = {groups}"
    elif chosen > total:
        what = f"num_experts_per_tok = {chosen} exceeds {entry} = {total}"
    elif chosen > kept * each:
        what = f"num_experts_per_tok = {chosen} exceeds the {kept * each} experts in topk_group = {kept} groups"
    if what:
        raise CheckpointError(f"{c.name}: {what}.", remedy="correct the entries, or fetch the file again")
    return total, chosen


def decoder_layer(b: Build, i: int, attn: Any, mlp: Any) -> DecoderLayer:
    """Layer i around its attention and its MLP."""
    name, width = f"model.layers.{i}", b.config.size("hidden_size")
    return DecoderLayer(
        attn_norm=replace(b.add_rms(f"{name}.input_layernorm", width), **codes_for(*readers(attn))),
        attn=attn,
        mlp_norm=replace(b.add_rms(f"{name}.post_attention_layernorm", width), **codes_for(*readers(mlp))),
        mlp=mlp,
    )


def readers(block: GQABlock | MLABlock | GatedMLP | MoE) -> list[Weight]:
    """Weights that meet what a block is given, but for routers, which take it as it is."""
    if isinstance(block, GQABlock):
        return [block.qkv.weight]
    if isinstance(block, MLABlock):
        return [(block.q_a or block.q_b).weight, block.kv_a.weight]
    if isinstance(block, GatedMLP):
        return [block.gate_up.weight]
    return [block.experts.gate_up, *([] if block.shared is None else [block.shared.gate_up.weight])]


def act_group(weight: Weight) -> int:
    """Columns that share a scale in activations that are coded for a weight: in FP8 128, also beside INT4, whose own
    groups may be smaller; 0, the whole row, beside FP8 weights with a scale a row, and in int8.
    """
    return 128 if weight.act == "fp8" and FORMATS[weight.format][2][1] else 0


def codes_for(*weights: Weight) -> dict[str, Any]:
    """Fields of a norm whose result these weights meet: the code that those that ask for one agree on. With a scale of
    the weight's own, which the norm does not know, the product codes.
    """
    asked = {(w.act, act_group(w)) for w in weights if w.act and w.format in FORMATS}
    if len(asked) != 1 or any(act.endswith(STATIC) for act, _ in asked):
        return {}
    ((format, group),) = asked
    return {"codes": format, "codes_group": group}


def decoder(b: Build, attn: Callable[[int, str], Any], mlp: Callable[[int, str], Any]) -> CausalLM:
    """A model whose layers are attention and MLP; both are functions of a layer's number and its part's name."""
    c = b.config
    vocab, width = c.size("vocab_size"), c.size("hidden_size")
    embed = b.embedding("model.embed_tokens", vocab, width)
    names = [(i, f"model.layers.{i}") for i in range(c.size("num_hidden_layers"))]
    return CausalLM(
        embed=embed,
        layers=tuple(decoder_layer(b, i, attn(i, f"{n}.self_attn"), mlp(i, f"{n}.mlp")) for i, n in names),
        norm=b.add_rms("model.norm", width),
        head=b.head(embed, vocab, width),
        gather=b.gather(),
    )


def dense(b: Build) -> Callable[[int, str], GatedMLP]:
    """The gated MLP of dense families."""
    inner, width = b.config.size("intermediate_size"), b.config.size("hidden_size")
    return lambda i, name: b.mlp(name, inner, width)


def window_of(c: Config) -> Window:
    """The window of every layer; None where the config states none."""
    return None if c.get("sliding_window") is None else c.size("sliding_window")


def layer_windows(c: Config) -> list[Window]:
    """Each layer's window where a config switches it on for some layers, as Qwen's do.

    `use_sliding_window` must be set; `layer_types` names the layers, else those from `max_window_layers` on have one.

    Raises:
        CheckpointError: the entries contradict each other.
        UnsupportedModelError: layers of another type.
    """
    layers = c.size("num_hidden_layers")
    if not c.flag("use_sliding_window") or c.get("sliding_window") is None:
        return [None] * layers
    window, first = c.size("sliding_window"), c.get("max_window_layers")
    kinds = c.get("layer_types")
    if kinds is None:
        first = 28 if first is None else c.count("max_window_layers")
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CheckpointError(
            f"{c.name}: layer_types is not a list of {layers} names, one a layer.",
            remedy="correct the entry, or fetch the file again",
        )
    known = {"sliding_attention": window, "full_attention": None}
    for kind in kinds:
        c.check("layer_types", kind, tuple(known))
    return [known[kind] for kind in kinds]
