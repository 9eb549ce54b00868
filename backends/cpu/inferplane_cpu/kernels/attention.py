"""Attention over core's paged cache on native kernels: grouped queries, windows, latents."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch

from inferplane.kernels.composed.attention import expand_and_attend
from inferplane.plugin import PLAIN, RANK_COMPOSED, RANK_PORTABLE, Batch, Kernels, LayerKV, StateCache, When
from inferplane_cpu.kernels.linear import multiply_many_rows
from inferplane_cpu.kernels.packing import LATENT_FORMATS, matrices
from inferplane_cpu.kernels.panel_storage import PACKING
from inferplane_cpu.kvcache import BLOCK_TOKENS
from inferplane_cpu.native import library
from inferplane_cpu.structs import Cache, Matrix, RaggedBatch

KERNELS = Kernels()
LAYOUTS = (f"paged_{BLOCK_TOKENS}", f"paged_{BLOCK_TOKENS}_int8", f"paged_{BLOCK_TOKENS}_fp8")
"""Entries in the plan's dtype, int8 or FP8, which layers write; attention converts FP8 to bfloat16 first."""
INT4_LAYOUTS = (f"paged_{BLOCK_TOKENS}_int4_spans", f"paged_{BLOCK_TOKENS}_k8v4_spans")
"""Entries of 4 bits in spans, which layers write too; what is not multiplied as it lies is converted first."""
KV_INT8, KV_FP8, KV_INT4, KV_INT4_DIFFERENCES = range(1, 5)
"""Kinds of entries (csrc/structs.h)."""
RANK_TILES = RANK_COMPOSED + 10
"""torch's attention behind a native product."""
RANK_SLOW = RANK_COMPOSED - 4
"""For many query tokens torch's attention is faster; it is not invariant to how a prompt is cut into chunks."""


def _has_few_queries(op: Any) -> bool:
    return bool(op.queries == "few")


def has_tile_dims(dim: int) -> bool:
    """Whether heads of this dim fill whole tiles, and at most eight of them (csrc/attention/prefill_tiles.h)."""
    return dim % 32 == 0 and dim <= 256


def _has_many_queries(op: Any) -> bool:
    return op.queries != "few" and has_tile_dims(op.kv.dim) and has_tile_dims(op.kv.v_dim)


def _has_bf16_kv_b(op: Any) -> bool:
    weight = getattr(op.kv_b, "weight", op.kv_b)
    return weight.dtype in (None, torch.bfloat16) and _has_no_kv_b_bias(op)


def _has_no_kv_b_bias(op: Any) -> bool:
    return getattr(op.kv_b, "bias", None) is None


def _has_whole_groups(op: Any) -> bool:
    return op.kv.dim % 32 == 0 and op.kv.v_dim % 32 == 0


def _has_few_queries_and_whole_groups(op: Any) -> bool:
    return _has_few_queries(op) and _has_whole_groups(op)


PAGED = When(dtypes=(torch.bfloat16,), kv_layouts=LAYOUTS, features=("native",))
ATTENTION = replace(PAGED, extensions=("attention.sinks", "attention.softcap"))
FEW = replace(ATTENTION, needs=(("few query tokens", _has_few_queries),))
MANY = replace(
    ATTENTION,
    features=("native", "tiles"),
    needs=(("many query tokens, heads of a multiple of 32 up to 256", _has_many_queries),),
)
ATTENTION_INT4 = replace(ATTENTION, kv_layouts=INT4_LAYOUTS, needs=(("heads of a multiple of 32", _has_whole_groups),))
FEW_INT4 = replace(
    FEW,
    kv_layouts=INT4_LAYOUTS,
    needs=(("few query tokens, heads of a multiple of 32", _has_few_queries_and_whole_groups),),
)
MANY_INT4 = replace(MANY, kv_layouts=INT4_LAYOUTS)
LATENT = replace(
    PAGED, formats=(PLAIN, "fp8_block"), needs=(("a kv_b in bfloat16 or FP8 without bias", _has_bf16_kv_b),)
)
LATENT_PANELS = replace(LATENT, formats=LATENT_FORMATS, needs=(("a kv_b without bias", _has_no_kv_b_bias),))
EXPANDED = When((torch.bfloat16,), (PLAIN, "fp8_block"), features=("native", "tiles"), needs=LATENT.needs)
KV_B, KV_B_ROWS = {"kv_b": PACKING}, {"kv_b.weight": PACKING}
LATENT_FP8 = replace(LATENT, formats=("fp8_block",))


def native_batch(batch: Batch) -> RaggedBatch:
    """The batch as the library reads it; its tensors must outlive the call."""
    tables = batch.block_tables
    return RaggedBatch(
        batch.query_start.data_ptr(),
        batch.seq_lens.data_ptr(),
        tables.data_ptr(),
        tables.shape[0],
        tables.stride(0),
    )


def native_cache(kv: LayerKV | StateCache) -> Cache:
    """A layer's cache, or its states, as the library reads it, described once."""
    return kv.once("inferplane_cpu.cache", _describe_cache, kv)


def _describe_cache(kv: Any) -> Cache:
    if isinstance(kv, StateCache):
        return Cache(*(tensor.data_ptr() for tensor in kv.tensors))
    if kv.layout in INT4_LAYOUTS:
        return _describe_int4(kv)
    k, v = kv.entries[0], kv.entries[-1]
    made = Cache(k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), block=kv.block_tokens)
    if kv.scales:
        made.k_kind = made.v_kind = KV_INT8 if k.dtype is torch.int8 else KV_FP8
        made.k_scale, made.v_scale = kv.scales[0].data_ptr(), kv.scales[-1].data_ptr()
        made.k_groups, made.v_groups = kv.scales[0].stride(0), kv.scales[-1].stride(0)
    return made


def _describe_int4(kv: Any) -> Cache:
    """Of 4 bits, strides are bytes of a span, `head` bytes of one of its heads, and `groups` entries of a group."""
    keys, values = kv.parts
    k, (v, ranges), heads = keys.tensors[0], values.tensors, kv.request.heads
    made = Cache(k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), block=kv.block_tokens)
    made.v_kind, made.v_ranges, made.v_groups = KV_INT4, ranges.data_ptr(), values.group
    made.v_head = v.stride(0) // heads
    if len(keys.tensors) == 2:
        made.k_kind, made.k_scale, made.k_groups = KV_INT8, keys.tensors[1].data_ptr(), keys.tensors[1].stride(0)
    else:
        _, ranges, first, scale = keys.tensors
        made.k_kind, made.k_groups, made.k_head = KV_INT4_DIFFERENCES, keys.differences.group, k.stride(0) // heads
        made.k_ranges, made.first, made.first_scale = ranges.data_ptr(), first.data_ptr(), scale.data_ptr()
    return made


@KERNELS("attention", "native", when=ATTENTION, rank=RANK_SLOW, batch_invariant=True)
def attention_batch_invariant(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Keys in spans counted from the sequence's beginning, whatever else the batch holds."""
    return attention(view, q, batch, kv)


def float_sinks(view: Any) -> torch.Tensor:
    """The sinks of an attention as the library reads them, `[heads]` in float32."""
    sinks: torch.Tensor = view.sinks.float().contiguous()
    return sinks


def _attend(function: Any, view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV, out: torch.Tensor) -> Any:
    sinks = None if view.sinks is None else view.once("inferplane_cpu.sinks", float_sinks, view)
    return function(
        q.data_ptr(),
        native_batch(batch),
        native_cache(kv),
        view.heads,
        view.kv.heads,
        view.kv.dim,
        view.kv.v_dim,
        view.scale,
        view.kv.window or 0,
        None if sinks is None else sinks.data_ptr(),
        view.softcap or 0.0,
        out.data_ptr(),
    )


@KERNELS("attention", "native", when=FEW, rank=RANK_PORTABLE, batch_invariant=True)
def attention(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The query heads of a group are rows over one read of its keys; threads share long sequences in spans."""
    q = q.contiguous()
    out = q.new_empty(q.shape[0], view.heads, view.kv.v_dim)
    _attend(library().ip_attention, view, q, batch, kv, out)
    return out


@KERNELS("attention", "native", when=MANY, rank=RANK_PORTABLE)
def attention_many(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """On tiles: some query tokens of a group's heads over keys as they lie; weights rounded to bf16, but on AVX2."""
    q = q.contiguous()
    out = q.new_empty(q.shape[0], view.heads, view.kv.v_dim)
    return out if _attend(library().ip_attention_prefill, view, q, batch, kv, out) else attention(view, q, batch, kv)


@KERNELS("attention", "native", when=ATTENTION_INT4, rank=RANK_SLOW, batch_invariant=True)
def attention_int4_batch_invariant(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """As `attention_batch_invariant`, over entries of 4 bits."""
    return attention(view, q, batch, kv)


@KERNELS("attention", "native", when=FEW_INT4, rank=RANK_PORTABLE, batch_invariant=True)
def attention_int4(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """As `attention`, over entries of 4 bits: with VNNI they are multiplied as integers, else converted to bfloat16."""
    return attention(view, q, batch, kv)


@KERNELS("attention", "native", when=MANY_INT4, rank=RANK_PORTABLE)
def attention_many_int4(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """As `attention_many`, over entries of 4 bits."""
    return attention_many(view, q, batch, kv)


def kv_b_of(view: Any, weight: Any) -> Matrix:
    """A site's kv_b as the library reads it, described once."""
    found: Matrix = view.once("inferplane_cpu.kv_b", matrices, weight)[0]
    return found


def _mla(view: Any, kv_b: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> Any:
    d = view.dims
    q_nope = q_nope if q_nope.stride(-1) == 1 else q_nope.contiguous()
    q_rope = q_rope if q_rope.stride(-1) == 1 else q_rope.contiguous()
    out = q_nope.new_empty(q_nope.shape[0], d.heads, d.value)
    library().ip_mla(
        q_nope.data_ptr(),
        (ctypes.c_int64 * 2)(*q_nope.stride()[:2]),
        q_rope.data_ptr(),
        (ctypes.c_int64 * 2)(*q_rope.stride()[:2]),
        kv_b_of(view, kv_b),
        native_batch(batch),
        native_cache(kv),
        d.heads,
        d.nope,
        d.rope,
        d.value,
        d.latent,
        view.scale,
        out.data_ptr(),
    )
    return out


@KERNELS("mla_absorbed", "native", when=LATENT, rank=RANK_PORTABLE, batch_invariant=True)
def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """All heads are rows over one read of the latents."""
    return _mla(view, view.kv_b, q_nope, q_rope, batch, kv)


@KERNELS("mla_absorbed", "native", when=LATENT_PANELS, packs=KV_B, rank=RANK_PORTABLE, batch_invariant=True)
def mla_absorbed_panels(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """As `mla_absorbed`, for a `kv_b` of 8 or 4 bits."""
    return _mla(view, view.kv_b, q_nope, q_rope, batch, kv)


@KERNELS("mla_expanded", "native", when=LATENT_PANELS, packs=KV_B_ROWS, rank=RANK_COMPOSED, needs_host_lens=True)
def mla_expanded_panels(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """As torch's, with a `kv_b` of 8 or 4 bits that is expanded in passing."""
    return expand_and_attend(
        view, q_nope, q_rope, batch, kv, lambda latent: multiply_many_rows(view.kv_b, latent, None)
    )


@KERNELS("mla_expanded", "native", when=LATENT_PANELS, packs=KV_B_ROWS, rank=RANK_SLOW, batch_invariant=True)
def mla_expanded_panels_batch_invariant(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """As `mla_expanded_batch_invariant`, for a `kv_b` of 8 or 4 bits."""
    return _mla(view, view.kv_b.weight, q_nope, q_rope, batch, kv)


@KERNELS("mla_expanded", "native", when=LATENT_FP8, rank=RANK_COMPOSED, needs_host_lens=True)
def mla_expanded_fp8(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """As torch's, with an FP8 `kv_b` that is expanded in passing, so that one copy serves few tokens and many."""
    return expand_and_attend(
        view, q_nope, q_rope, batch, kv, lambda latent: multiply_many_rows(view.kv_b, latent, None)
    )


@KERNELS("mla_expanded", "native", when=LATENT, rank=RANK_SLOW, batch_invariant=True)
def mla_expanded_batch_invariant(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """The absorbed form for many query tokens too, so that a chunk's size does not choose the arithmetic."""
    return _mla(view, view.kv_b.weight, q_nope, q_rope, batch, kv)


@KERNELS("mla_expanded", "native", when=EXPANDED, rank=RANK_TILES, needs_host_lens=True)
def mla_expanded(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Latents expanded on tiles, for which nothing is compiled, padded or kept; then torch's attention."""
    return expand_and_attend(
        view, q_nope, q_rope, batch, kv, lambda latent: multiply_many_rows(view.kv_b, latent, None, True)
    )
