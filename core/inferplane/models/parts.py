"""Building blocks that several families share: attention blocks, mixtures of experts, the model around the layers.

Names of weights are those of Hugging Face checkpoints, in which these families agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from inferplane import ops
from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.reading.config import Config
from inferplane.models.rope import mscale
from inferplane.types import ActivationQuant, KVRequest, Shard, Weight

LAYERS = "num_hidden_layers"

Window = int | None
"""A layer's attention window in tokens; None: it attends to all tokens."""

LATENT_EPS = 1e-6
"""Epsilon of the norms on latents. It does not depend on `rms_norm_eps`: DeepSeek's published modeling files and
transformers use this constant too."""


def grouped_query_attention(
    build: Build,
    *,
    bias: bool = False,
    out_bias: bool = False,
    norms: bool = False,
    windows: Sequence[Window] = (),
    theta: float = 10000.0,
) -> Callable[[int, str], ops.GQABlock]:
    """Return a function that builds a layer's grouped-query attention from the layer's number and the attention's name.

    Args:
        build: its config gives heads and sizes.
        bias: whether q, k and v have biases. out_bias: whether the output has one.
        norms: whether each head's q and k have norms.
        windows: each layer's attention window; empty: none has one.
        theta: rotary base if the config states none.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UsageError: the ranks cannot share the heads.
    """
    config = build.config
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.name}: num_attention_heads = {heads} cannot be shared equally by "
            f"num_key_value_heads = {kv_heads}.",
            remedy="correct the entries, or fetch the file again",
        )
    if config.get("head_dim") is None and width % heads:
        raise CheckpointError(
            f"{config.name}: hidden_size = {width} cannot be divided into num_attention_heads = {heads} equal heads.",
            remedy="correct the entries, or add head_dim",
        )
    dim = config.size("head_dim", width // heads)
    local_heads = build.local_size("num_attention_heads", heads)
    local_kv_heads, kv_shard = build.placement.heads("num_key_value_heads", kv_heads)
    shards = (Shard(0, build.placement.tp_rank, build.placement.tp_size), kv_shard, kv_shard)
    rows = (local_heads * dim, local_kv_heads * dim, local_kv_heads * dim)
    rope = ops.Rope(build.rope(dim, theta))

    def block(i: int, name: str) -> ops.GQABlock:
        request = KVRequest("gqa", local_kv_heads, dim, dim, windows[i] if windows else None)
        q_norm, k_norm = (build.rms_norm(f"{name}.{part}_norm", dim) if norms else None for part in "qk")
        qkv = [f"{name}.{part}_proj" for part in "qkv"]
        return ops.GQABlock(
            qkv=build.linear(*qkv, rows=rows, columns=width, axis=0, bias=bias, shards=shards),
            o=build.linear(f"{name}.o_proj", rows=width, columns=local_heads * dim, axis=1, bias=out_bias),
            enter=ops.NormRopeWrite(rope, ops.KVWrite(request), q_norm, k_norm),
            few=ops.Attention(local_heads, dim**-0.5, request, "few"),
            many=ops.Attention(local_heads, dim**-0.5, request, "many"),
            heads=(local_heads, local_kv_heads),
            head_dim=dim,
            reduce=build.reduce(),
        )

    return block


def latent_attention(build: Build) -> Callable[[int, str], ops.MLABlock]:
    """Return a function that builds a layer's latent attention (MLA) from the layer's number and the attention's name.

    The query has a low-rank projection where the config gives `q_lora_rank`.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UsageError: the ranks cannot share the heads.
    """
    config = build.config
    width, rank = config.size("hidden_size"), config.count("q_lora_rank")
    dims = ops.MLADims(
        heads=build.local_size("num_attention_heads", config.size("num_attention_heads")),
        nope=config.size("qk_nope_head_dim"),
        rope=config.size("qk_rope_head_dim"),
        value=config.size("v_head_dim"),
        latent=config.size("kv_lora_rank"),
    )
    rope = ops.Rope(build.rope(dims.rope), config.flag("rope_interleave", True))  # checks the settings
    settings, scale = config.rope, (dims.nope + dims.rope) ** -0.5
    if settings["rope_type"] != "default" and settings.get("mscale_all_dim"):
        scale *= mscale(settings["factor"], settings["mscale_all_dim"]) ** 2

    def block(i: int, name: str) -> ops.MLABlock:
        q_rows = dims.heads * (dims.nope + dims.rope)
        kv_b = build.weight((f"{name}.kv_b_proj",), (dims.heads * (dims.nope + dims.value), dims.latent), 0)
        q_b = f"{name}.q_b_proj" if rank else f"{name}.q_proj"
        q_up = build.linear(q_b, rows=q_rows, columns=rank or width, axis=0)
        q_a_norm = build.rms_norm(f"{name}.q_a_layernorm", rank, LATENT_EPS) if rank else None
        kv_a_norm = build.rms_norm(f"{name}.kv_a_layernorm", dims.latent, LATENT_EPS)
        output_quant = norm_output_quant(q_up.weight) if rank else None
        return ops.MLABlock(
            q_a=build.linear(f"{name}.q_a_proj", rows=rank, columns=width) if rank else None,
            q_b=q_up,
            kv_a=build.linear(f"{name}.kv_a_proj_with_mqa", rows=dims.latent + dims.rope, columns=width),
            enter=ops.MLANormRopeWrite(q_a_norm, kv_a_norm, rope, ops.MLAKVWrite(dims.request), dims, output_quant),
            rope=rope,
            expanded=ops.MLAExpanded(ops.Linear(kv_b), dims, scale, dims.request),
            absorbed=ops.MLAAbsorbed(kv_b, dims, scale, dims.request),
            o=build.linear(f"{name}.o_proj", rows=width, columns=dims.heads * dims.value, axis=1),
            dims=dims,
            reduce=build.reduce(),
        )

    return block


def mixture_of_experts(
    build: Build,
    name: str,
    route: ops.MoERoute,
    *,
    count: str,
    inner: str = "moe_intermediate_size",
    shared: int = 0,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> ops.MoE:
    """Build a mixture-of-experts layer; its router is read from `name.gate`.

    Args:
        build: its config gives the sizes.
        name: prefix of the layer's MLP in the checkpoint.
        route: chooses the experts of a token.
        count: name of the config entry with the number of experts.
        inner: name of the config entry with the size of one expert.
        shared: number of experts that every token takes, one MLP `name.shared_experts` together; the layer sums its
            result over the ranks together with the others'.
        parts: names of gate, up and down projections in the checkpoint.

    Raises:
        CheckpointError: the config lacks an entry.
        UnsupportedModelError: the config names another activation than SiLU.
    """
    build.config.refuse(hidden_act=("silu",))
    width, experts, size = (build.config.size(entry) for entry in ("hidden_size", count, inner))
    mine = build.placement.experts(count, experts)
    divided = len(mine) == experts  # either a slice of every expert is here, or some experts in full
    rows = build.local_size(inner, size) if divided else size
    both = build.mlp(f"{name}.shared_experts", shared * size, width, inner) if shared else None
    gate, up, down = parts
    if not divided:
        build.ignore(f"{name}.experts.*")  # experts of the other ranks
    gate_up = [f"{name}.experts.{e}.{part}" for e in mine for part in (gate, up)]
    downs = [f"{name}.experts.{e}.{down}" for e in mine]
    return ops.MoE(
        router=build.router(f"{name}.gate", experts, width),
        route=route,
        experts=ops.MoEExperts(
            build.weight(gate_up, (len(mine), 2 * rows, width), 0 if divided else None),
            build.weight(downs, (len(mine), width, rows), 1 if divided else None),
            partial=not divided,
        ),
        shared=None if both is None else replace(both, reduce=None),
        reduce=build.reduce(),
        here=None if divided else (mine[0], len(mine)),
    )


def experts_per_token(config: Config, entry: str, groups: int = 1, top_groups: int = 1) -> int:
    """Read the number of experts per token, and check that a router can choose them.

    Args:
        config: the model's.
        entry: name of the config entry with the number of experts.
        groups: number of expert groups. top_groups: number of groups that a token may choose from.

    Raises:
        CheckpointError: the numbers contradict each other.
    """
    total, chosen = config.size(entry), config.size("num_experts_per_tok")
    each = total // groups
    what = ""
    if total % groups:
        what = f"{total} experts cannot form {groups} equal groups"
    elif top_groups > groups:
        what = f"topk_group = {top_groups} exceeds n_group = {groups}"
    elif chosen > total:
        what = f"num_experts_per_tok = {chosen} exceeds {entry} = {total}"
    elif chosen > top_groups * each:
        what = f"num_experts_per_tok = {chosen} exceeds the {top_groups * each} experts in topk_group = {top_groups} "
        what += "groups"
    if what:
        raise CheckpointError(f"{config.name}: {what}.", remedy="correct the entries, or fetch the file again")
    return chosen


def decoder_layer(build: Build, i: int, attn: Any, mlp: Any) -> ops.DecoderLayer:
    """Build decoder layer `i` from its attention and its MLP."""
    name, width = f"model.layers.{i}", build.config.size("hidden_size")

    def norm_before(block: Any, part: str) -> ops.AddRMSNorm:
        quant = norm_output_quant(*input_weights(block))
        return replace(build.add_rms_norm(f"{name}.{part}", width), output_quant=quant)

    return ops.DecoderLayer(
        norm_before(attn, "input_layernorm"), attn, norm_before(mlp, "post_attention_layernorm"), mlp
    )


def input_weights(block: ops.GQABlock | ops.MLABlock | ops.GatedMLP | ops.MoE) -> list[Weight]:
    """The weights that a block multiplies its input by. Routers are left out: their input is never quantized."""
    if isinstance(block, ops.GQABlock):
        return [block.qkv.weight]
    if isinstance(block, ops.MLABlock):
        return [(block.q_a or block.q_b).weight, block.kv_a.weight]
    if isinstance(block, ops.GatedMLP):
        return [block.gate_up.weight]
    return [block.experts.gate_up, *([] if block.shared is None else [block.shared.gate_up.weight])]


def norm_output_quant(*weights: Weight) -> ActivationQuant | None:
    """How the norm before these weights may quantize its result: what the quantized ones among them all request.

    None if they request different things, or a static scale, which only the linear itself knows.
    """
    quants = {w.activation_quant for w in weights if w.activation_quant is not None and w.format in ops.FORMATS}
    quant = quants.pop() if len(quants) == 1 else None
    return None if quant is None or quant.static else quant


def decoder_model(build: Build, attn: Callable[[int, str], Any], mlp: Callable[[int, str], Any]) -> ops.CausalLM:
    """Build a causal language model.

    Args:
        build: config, placement and weight formats.
        attn: builds a layer's attention from the layer's number and the attention's name in the checkpoint.
        mlp: the same for the layer's MLP.
    """
    config = build.config
    vocab, width = config.size("vocab_size"), config.size("hidden_size")
    embed = build.embedding("model.embed_tokens", vocab, width)
    names = [(i, f"model.layers.{i}") for i in range(config.size(LAYERS))]
    return ops.CausalLM(
        embed=embed,
        layers=ops.DecoderStack(
            tuple(decoder_layer(build, i, attn(i, f"{n}.self_attn"), mlp(i, f"{n}.mlp")) for i, n in names)
        ),
        norm=build.add_rms_norm("model.norm", width),
        head=build.head(embed, vocab, width),
        gather=build.gather(),
    )


def dense_mlp(build: Build) -> Callable[[int, str], ops.GatedMLP]:
    """Return a function that builds a layer's gated MLP from the layer's number and the MLP's name."""
    inner, width = build.config.size("intermediate_size"), build.config.size("hidden_size")
    return lambda i, name: build.mlp(name, inner, width)


def sliding_window(config: Config) -> list[Window]:
    """Each layer's attention window, the same for all; empty if the config states none."""
    return [] if config.get("sliding_window") is None else [config.size("sliding_window")] * config.size(LAYERS)


def layer_windows(config: Config) -> list[Window]:
    """Each layer's attention window, for configs that switch windows on for some layers, as Qwen's do; empty if off.

    Windows apply only if `use_sliding_window` is set. `layer_types` names the layers that have one; without it, layers
    from `max_window_layers` on have one.

    Raises:
        CheckpointError: the entries contradict each other.
        UnsupportedModelError: a layer has another type.
    """
    if not config.flag("use_sliding_window") or config.get("sliding_window") is None:
        return []
    layers, window = config.size(LAYERS), config.size("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = 28 if config.get("max_window_layers") is None else config.count("max_window_layers")
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CheckpointError(
            f"{config.name}: layer_types is not a list of {layers} names, one a layer.",
            remedy="correct the entry, or fetch the file again",
        )
    known = {"sliding_attention": window, "full_attention": None}
    for kind in kinds:
        config.check("layer_types", kind, tuple(known))
    return [known[kind] for kind in kinds]
