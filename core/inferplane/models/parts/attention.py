"""Attention blocks that several families share: grouped-query and latent attention, and windows by layer.

Names of weights are those of Hugging Face checkpoints, in which these families agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from inferplane import ops
from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.parts.layers import LAYERS, layer_kinds, norm_output_quant
from inferplane.models.parts.rotation import Rotation, head_size, rotate_all, rotation
from inferplane.models.reading.config import Config
from inferplane.models.rope import mscale, resting_table
from inferplane.types import KVRequest, Shard, Weight

Window = int | None
"""A layer's attention window in tokens; None: it attends to all tokens."""

LATENT_EPS = 1e-6
"""Epsilon of the norms on latents. It does not depend on `rms_norm_eps`: DeepSeek's published modeling files and
transformers use this constant too."""


@dataclass(frozen=True)
class HeadNorms:
    """Norms on q and k.

    Args:
        kind: RMS norms of "each" head, RMS norms of the "width" of all heads together, layer norms of each head whose
            weights differ "by_head", or "none".
        names: their names in the checkpoint.
        last: whether they follow the rotation.
        offset: whether the weights of norms of "each" head are stored without their 1.
    """

    kind: Literal["none", "each", "width", "by_head"] = "each"
    names: tuple[str, str] = ("q_norm", "k_norm")
    last: bool = False
    offset: bool = False


def grouped_query_attention(
    build: Build,
    *,
    bias: bool = False,
    out_bias: bool = False,
    norms: bool | HeadNorms = False,
    windows: Sequence[Window] = (),
    interleaved: bool = False,
    ropes: Sequence[Rotation | None] = (),
    scale: float | None = None,
    q_factors: Weight | None = None,
    qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
) -> Callable[[int, str], ops.GQABlock]:
    """Return a function that builds a layer's grouped-query attention from the layer's number and the attention's name.

    Args:
        build: its config gives heads and sizes.
        bias: whether q, k and v have biases. out_bias: whether the output has one.
        norms: whether q and k have RMS norms of each head, or which others they have.
        windows: each layer's attention window; empty: none has one.
        interleaved: whether rotary positions turn adjacent entries, not those half a head apart.
        ropes: each layer's rotation, None where it has none; empty: the config's in all layers (`rotation`).
        scale: the scores' factor; None: one over the square root of the heads' size.
        q_factors: factor on the queries by position, float32 `[positions]`.
        qkv: names of the projections in the checkpoint; one name if they are stored as one.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UsageError: the ranks cannot share the heads.
    """
    config = build.config
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads, dim = config.size("num_key_value_heads", heads), head_size(config)
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.name}: num_attention_heads = {heads} cannot be shared equally by "
            f"num_key_value_heads = {kv_heads}.",
            remedy="correct the entries, or fetch the file again",
        )
    local_heads = build.local_size("num_attention_heads", heads)
    local_kv_heads, kv_shard = build.placement.heads("num_key_value_heads", kv_heads)
    shards = (Shard(0, build.placement.tp_rank, build.placement.tp_size), kv_shard, kv_shard)
    sizes = (local_heads * dim, local_kv_heads * dim, local_kv_heads * dim)
    rows, own_shards = (sizes, shards) if len(qkv) == 3 else (sum(sizes), None)
    default = None if ropes else rotation(build, dim, interleaved=interleaved)
    factor = dim**-0.5 if scale is None else scale

    form = norms if isinstance(norms, HeadNorms) else HeadNorms("each" if norms else "none")

    def enter(i: int, name: str, write: ops.KVWrite) -> ops.NormRopeWrite | ops.PrepareAttention:
        rope = ropes[i] if ropes else default
        q, k = (f"{name}.{part}" for part in form.names)
        if form.kind == "width":
            pair = build.width_norm(q, dim, heads, shards[0]), build.width_norm(k, dim, kv_heads, shards[1])
            return ops.PrepareAttention(write, rope, *pair, form.last, q_factors)
        if form.kind == "by_head":
            by_head = (
                build.head_norm(q, local_heads, dim, shards[0]),
                build.head_norm(k, local_kv_heads, dim, shards[1]),
            )
            return ops.PrepareAttention(write, rope, *by_head, form.last, q_factors)
        norm = build.offset_rms_norm if form.offset else build.rms_norm
        q_norm, k_norm = (norm(part, dim) if form.kind == "each" else None for part in (q, k))
        if isinstance(rope, ops.Rope) and not form.last and q_factors is None:
            return ops.NormRopeWrite(rope, write, q_norm, k_norm)
        return ops.PrepareAttention(write, rope, q_norm, k_norm, form.last, q_factors)

    def block(i: int, name: str) -> ops.GQABlock:
        request = KVRequest("gqa", local_kv_heads, dim, dim, windows[i] if windows else None)
        names = [f"{name}.{part}" for part in qkv]
        return ops.GQABlock(
            qkv=build.linear(*names, rows=rows, columns=width, axis=0, bias=bias, shards=own_shards),
            o=build.linear(f"{name}.o_proj", rows=width, columns=local_heads * dim, axis=1, bias=out_bias),
            enter=enter(i, name, ops.KVWrite(request)),
            few=ops.Attention(local_heads, factor, request, "few"),
            many=ops.Attention(local_heads, factor, request, "many"),
            heads=(local_heads, local_kv_heads),
            head_dim=dim,
            reduce=build.reduce(),
        )

    return block


def attention_with_gates(build: Build) -> Callable[[int, str], ops.GQABlock]:
    """Return a function that builds a layer's attention in Qwen3-Next's form, from the layer's number and the
    attention's name.

    A share of each head is rotated, norms of q and k are stored without their 1, and each head has a gate.

    Args:
        build: its config gives heads, sizes and whether all projections have biases.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UsageError: the ranks cannot share the heads.
    """
    config = build.config
    width, dim, bias = config.size("hidden_size"), head_size(config), config.flag("attention_bias")
    ropes = rotate_all(build, rotation(build, dim, partial=True))
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, norms=HeadNorms(offset=True), ropes=ropes)

    def block(i: int, name: str) -> ops.GQABlock:
        plain = attention(i, name)
        heads, kv_heads = plain.heads
        names = [f"{name}.{part}_proj" for part in "qkv"]
        rows = (2 * heads * dim, kv_heads * dim, kv_heads * dim)
        shards = tuple(plain.qkv.weight.shard_of(part) for part in range(3))
        qkv = build.linear(*names, rows=rows, columns=width, bias=bias, shards=shards)
        return replace(plain, qkv=qkv, output_gate=True)

    return block


def attention_with_values(
    build: Build, attention: Callable[[int, str], ops.GQABlock], v_dim: int, *, factor: float = 1.0, bias: bool = False
) -> Callable[[int, str], ops.GQABlock]:
    """Return a function that builds a layer's attention as another one does, with values of another width than keys.

    Args:
        build: its config gives the sizes.
        attention: builds a layer's attention with values of the keys' width, and without a bias of the output.
        v_dim: entries of a head's values.
        factor: on the values.
        bias: whether q, k and v have biases.
    """
    width = build.config.size("hidden_size")

    def block(i: int, name: str) -> ops.GQABlock:
        plain = attention(i, name)
        (heads, kv_heads), dim, request = plain.heads, plain.head_dim, replace(plain.few.kv, v_dim=v_dim)
        rows = (heads * dim, kv_heads * dim, kv_heads * v_dim)
        shards = tuple(plain.qkv.weight.shard_of(part) for part in range(3))
        names = [f"{name}.{part}_proj" for part in "qkv"]
        return replace(
            plain,
            qkv=build.linear(*names, rows=rows, columns=width, bias=bias, shards=shards),
            o=build.linear(f"{name}.o_proj", rows=width, columns=heads * v_dim, axis=1),
            enter=replace(plain.enter, write=ops.KVWrite(request)),
            few=replace(plain.few, kv=request),
            many=replace(plain.many, kv=request),
            v_dim=v_dim,
            v_factor=factor,
        )

    return block


def with_head_gates(
    build: Build, attention: Callable[[int, str], ops.GQABlock], name: str = "g_proj"
) -> Callable[[int, str], ops.GQABlock]:
    """Return a function that builds a layer's attention as another one does, with a gate for each head.

    Args:
        build: its config gives the width, and it divides the heads over ranks.
        attention: builds a layer's attention.
        name: of the gates' projection in the checkpoint, below the attention.
    """

    def block(i: int, at: str) -> ops.GQABlock:
        plain, width = attention(i, at), build.config.size("hidden_size")
        return replace(plain, head_gate=build.linear(f"{at}.{name}", rows=plain.few.heads, columns=width, axis=0))

    return block


def with_sinks(
    build: Build, attention: Callable[[int, str], ops.GQABlock], name: str = "sinks"
) -> Callable[[int, str], ops.GQABlock]:
    """Return a function that builds a layer's attention as another one does, with a sink for each head.

    Args:
        build: divides the heads over ranks.
        attention: builds a layer's attention.
        name: of the sinks in the checkpoint, below the attention.
    """

    def block(i: int, at: str) -> ops.GQABlock:
        plain = attention(i, at)
        sinks = Weight((f"{at}.{name}",), (plain.few.heads,), shard=build.shard(0))
        return replace(plain, few=replace(plain.few, sinks=sinks), many=replace(plain.many, sinks=sinks))

    return block


def latent_attention(
    build: Build, *, interleave: bool = True, rotates: bool = True, factors: tuple[float, float] = (1.0, 1.0)
) -> Callable[[int, str], ops.MLABlock]:
    """Return a function that builds a layer's latent attention (MLA) from the layer's number and the attention's name.

    The query has a low-rank projection where the config gives `q_lora_rank`.

    Args:
        build: its config gives heads, sizes and whether the projections of inputs and outputs have biases.
        interleave: whether rotary positions turn adjacent entries, not those half a head apart.
        rotates: whether there are rotary positions; if not, the entries that all heads share stay as they are.
        factors: on the query, and on the latent behind its norm.

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
    table = build.rope(dims.rope) if rotates else resting_table(dims.rope, build.positions)  # checks the settings
    rope, settings, scale = ops.Rope(table, interleave), config.rope, (dims.nope + dims.rope) ** -0.5 * factors[0]
    bias = config.flag("attention_bias")
    if rotates and settings["rope_type"] != "default" and settings.get("mscale_all_dim"):
        scale *= mscale(settings["factor"], settings["mscale_all_dim"]) ** 2

    def block(i: int, name: str) -> ops.MLABlock:
        q_rows = dims.heads * (dims.nope + dims.rope)
        kv_b = build.weight((f"{name}.kv_b_proj",), (dims.heads * (dims.nope + dims.value), dims.latent), 0)
        q_b = f"{name}.q_b_proj" if rank else f"{name}.q_proj"
        q_up = build.linear(q_b, rows=q_rows, columns=rank or width, axis=0)
        q_a_norm = build.rms_norm(f"{name}.q_a_layernorm", rank, LATENT_EPS) if rank else None
        kv_a_norm = replace(build.rms_norm(f"{name}.kv_a_layernorm", dims.latent, LATENT_EPS), factor=factors[1])
        output_quant = norm_output_quant(q_up.weight) if rank else None
        return ops.MLABlock(
            q_a=build.linear(f"{name}.q_a_proj", rows=rank, columns=width, bias=bias) if rank else None,
            q_b=q_up,
            kv_a=build.linear(f"{name}.kv_a_proj_with_mqa", rows=dims.latent + dims.rope, columns=width, bias=bias),
            enter=ops.MLANormRopeWrite(q_a_norm, kv_a_norm, rope, ops.MLAKVWrite(dims.request), dims, output_quant),
            rope=rope,
            expanded=ops.MLAExpanded(ops.Linear(kv_b), dims, scale, dims.request),
            absorbed=ops.MLAAbsorbed(kv_b, dims, scale, dims.request),
            o=build.linear(f"{name}.o_proj", rows=width, columns=dims.heads * dims.value, axis=1, bias=bias),
            dims=dims,
            reduce=build.reduce(),
        )

    return block


def sliding_window(config: Config) -> list[Window]:
    """Each layer's attention window, the same for all; empty if the config states none."""
    return [] if config.get("sliding_window") is None else [config.size("sliding_window")] * config.size(LAYERS)


def layer_windows(config: Config, has_window: Callable[[int], bool] | None = None) -> list[Window]:
    """Each layer's attention window, for configs in which some layers have one; empty if the config states none.

    `layer_types` names the layers that have one.

    Args:
        config: the model's.
        has_window: whether a layer has one if the config lacks `layer_types`. None: as in Qwen's models, in which
            windows apply only if `use_sliding_window` is set, from layer `max_window_layers` on.

    Raises:
        CheckpointError: the entries contradict each other.
        UnsupportedModelError: a layer has another type.
    """
    if config.get("sliding_window") is None or (has_window is None and not config.flag("use_sliding_window")):
        return []
    layers, window = config.size(LAYERS), config.size("sliding_window")
    first = config.count("max_window_layers")
    has_window = has_window or (lambda i: i >= first)
    left_out = ["sliding_attention" if has_window(i) else "full_attention" for i in range(layers)]
    known = {"sliding_attention": window, "full_attention": None}
    return [known[kind] for kind in layer_kinds(config, tuple(known), left_out)]
