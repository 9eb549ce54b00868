"""Sparse latent attention on native kernels: selection by index scores, and attention over chosen latents."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch

from inferplane.kernels.composed.sparse import expand_and_attend_chosen
from inferplane.plugin import RANK_PORTABLE, Batch, Kernels, LayerKV
from inferplane_cpu.kernels.attention import (
    KV_B,
    KV_B_ROWS,
    LATENT,
    LATENT_PANELS,
    LAYOUTS,
    PAGED,
    RANK_SLOW,
    RANK_TILES,
    kv_b_of,
    native_batch,
    native_cache,
)
from inferplane_cpu.kernels.linear import multiply_many_rows
from inferplane_cpu.kvcache import COMPRESSED_BLOCK_TOKENS
from inferplane_cpu.native import library
from inferplane_cpu.structs import RaggedBatch

KERNELS = Kernels()


def _has_even_dim(op: Any) -> bool:
    return bool(op.dims.dim % 2 == 0)


COMPRESSED_LAYOUTS = tuple(f"paged_{COMPRESSED_BLOCK_TOKENS}{suffix}" for suffix in ("", "_int8", "_fp8"))
INDEX = replace(
    PAGED,
    kv_layouts=(*LAYOUTS, *COMPRESSED_LAYOUTS),
    needs=(("index keys of an even size", _has_even_dim),),
    extensions=("index_select.rate",),
)


@KERNELS("index_select", "native", when=INDEX, rank=RANK_PORTABLE, batch_invariant=True)
def index_select(view: Any, q: torch.Tensor, w: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Heads are lanes over one read of a key; the least score that is chosen is found by its bits. Rows of padding are
    -1.
    """
    d, tables = view.dims, (batch if view.rate == 1 else batch.for_entries(kv)).block_tables
    native = RaggedBatch(
        batch.query_start.data_ptr(),
        batch.seq_lens.data_ptr(),
        tables.data_ptr(),
        tables.shape[0],
        tables.stride(0),
    )
    q, w = q.contiguous(), w.contiguous()
    out = torch.full((q.shape[0], d.top), -1, dtype=torch.int32)
    library().ip_index_select(
        q.data_ptr(), w.data_ptr(), native, native_cache(kv), d.heads, d.dim, d.top, view.rate, out.data_ptr()
    )
    return out


def _attend(
    view: Any,
    kv_b: Any,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    chosen: torch.Tensor,
    batch: Batch,
    kv: LayerKV,
) -> torch.Tensor:
    d = view.dims
    q_nope = q_nope if q_nope.stride(-1) == 1 else q_nope.contiguous()
    q_rope = q_rope if q_rope.stride(-1) == 1 else q_rope.contiguous()
    chosen = chosen.contiguous()
    out = q_nope.new_empty(q_nope.shape[0], d.heads, d.value)
    library().ip_sparse_mla(
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
        chosen.data_ptr(),
        chosen.shape[1],
        out.data_ptr(),
    )
    return out


@KERNELS("sparse_mla_absorbed", "native", when=LATENT, rank=RANK_PORTABLE, batch_invariant=True)
def sparse_mla_absorbed(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """As `mla_absorbed`, over entries that are gathered as they are stored."""
    return _attend(view, view.kv_b, q_nope, q_rope, chosen, batch, kv)


@KERNELS("sparse_mla_absorbed", "native", when=LATENT_PANELS, packs=KV_B, rank=RANK_PORTABLE, batch_invariant=True)
def sparse_mla_absorbed_panels(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """As `sparse_mla_absorbed`, for a `kv_b` of 8 or 4 bits."""
    return _attend(view, view.kv_b, q_nope, q_rope, chosen, batch, kv)


def _expands_sooner(view: Any, queries: int, tokens: int) -> bool:
    """Whether expanding all tokens of a sequence takes fewer multiplications than to attend absorbed to chosen ones."""
    d = view.dims
    expanded = queries * tokens * (d.nope + d.rope + d.value) + tokens * d.latent * (d.nope + d.value)
    chosen = min(tokens, view.top) * (2 * d.latent + d.rope)
    return bool(expanded <= queries * (chosen + d.latent * (d.nope + d.value)))


def _attend_many(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    def expand(latent: torch.Tensor) -> torch.Tensor:
        return multiply_many_rows(view.kv_b, latent, None)

    out = q_nope.new_empty(q_nope.shape[0], view.dims.heads, view.dims.value)
    for i, (a, b, n, table) in enumerate(batch.rows()):
        if _expands_sooner(view, b - a, n):
            q = torch.cat((q_nope[a:b], q_rope[a:b]), -1)
            out[a:b] = expand_and_attend_chosen(view, q, chosen[a:b], n, kv, table, expand)
            continue
        rows = replace(batch, query_start=batch.query_start.new_tensor((0, b - a)), seq_lens=batch.seq_lens[i : i + 1])
        rows = replace(rows, block_tables=batch.block_tables[i : i + 1])
        out[a:b] = _attend(view, view.kv_b.weight, q_nope[a:b], q_rope[a:b], chosen[a:b], rows, kv)
    return out


@KERNELS("sparse_mla_expanded", "native", when=LATENT, rank=RANK_TILES, needs_host_lens=True)
def sparse_mla_expanded(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """Each sequence in the form that multiplies less: expanded, then torch's attention with a mask, or absorbed."""
    return _attend_many(view, q_nope, q_rope, chosen, batch, kv)


@KERNELS("sparse_mla_expanded", "native", when=LATENT_PANELS, packs=KV_B_ROWS, rank=RANK_TILES, needs_host_lens=True)
def sparse_mla_expanded_panels(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """As `sparse_mla_expanded`, for a `kv_b` of 8 or 4 bits."""
    return _attend_many(view, q_nope, q_rope, chosen, batch, kv)


@KERNELS("sparse_mla_expanded", "native", when=LATENT, rank=RANK_SLOW, batch_invariant=True)
def sparse_mla_expanded_batch_invariant(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """The absorbed form for many query tokens too, so that a chunk's size does not choose the arithmetic."""
    return _attend(view, view.kv_b.weight, q_nope, q_rope, chosen, batch, kv)


@KERNELS("sparse_mla_expanded", "native", when=LATENT_PANELS, packs=KV_B_ROWS, rank=RANK_SLOW, batch_invariant=True)
def sparse_mla_expanded_panels_batch_invariant(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """As `sparse_mla_expanded_batch_invariant`, for a `kv_b` of 8 or 4 bits."""
    return _attend(view, view.kv_b.weight, q_nope, q_rope, chosen, batch, kv)
