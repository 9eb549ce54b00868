"""Attention of one KV head whose entries are keys and values, on native attention over entries that are latents, all of
which are values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from inferplane.plugin import RANK_PORTABLE, Batch, CompressedCache, Kernels, LayerKV
from inferplane_cpu.kernels.attention import PAGED, float_sinks, native_batch, native_cache
from inferplane_cpu.kernels.sparse_attention import COMPRESSED_LAYOUTS
from inferplane_cpu.native import library
from inferplane_cpu.structs import Cache, RaggedBatch

KERNELS = Kernels()


def _has_few_queries(op: Any) -> bool:
    return bool(op.queries == "few")


ENTRIES = replace(PAGED, kv_layouts=COMPRESSED_LAYOUTS)
PLAIN_ENTRIES = replace(PAGED, kv_layouts=COMPRESSED_LAYOUTS[:1])
FEW = replace(PLAIN_ENTRIES, needs=(("few query tokens", _has_few_queries),))


def _attend(view: Any, q: torch.Tensor, batch: RaggedBatch, cache: Cache, window: int) -> torch.Tensor:
    sinks, dim = view.once("inferplane_cpu.sinks", float_sinks, view), view.kv.dim
    q = q.contiguous()
    out = torch.empty_like(q)
    library().ip_attention(
        q.data_ptr(),
        batch,
        cache,
        view.heads,
        1,
        dim,
        dim,
        view.scale,
        window,
        sinks.data_ptr(),
        0.0,
        out.data_ptr(),
    )
    return out


@KERNELS("shared_kv_attention", "native", when=ENTRIES, rank=RANK_PORTABLE, batch_invariant=True)
def shared_kv_attention(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """All heads are rows over one read of an entry, also of many query tokens: each sees its window alone."""
    return _attend(view, q, native_batch(batch), native_cache(kv), view.kv.window or 0)


def gather_slots(batch: Batch, per_block: int, numbers: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """The slots `[n, m]` of entries with some numbers `[n, m]` in the sequence `[n]` of each row."""
    blocks = batch.block_tables[sequence[:, None], numbers // per_block].long()
    return blocks * per_block + numbers % per_block


def list_sequences(batch: Batch) -> torch.Tensor:
    """The number of each token's sequence, int64 `[T]`."""
    return torch.searchsorted(batch.query_start[1:], torch.arange(batch.tokens, dtype=torch.int32), right=True)


@KERNELS("compressed_attention", "native", when=FEW, rank=RANK_PORTABLE, batch_invariant=True)
def compressed_attention(
    view: Any, q: torch.Tensor, chosen: torch.Tensor | None, batch: Batch, cache: CompressedCache
) -> torch.Tensor:
    """The entries that each query sees are gathered one after another, those of its window first; then each query token
    is a sequence with one token.
    """
    (window, near_table), (entries, far_table) = cache.window, cache.compressed.entries
    near, far = batch.for_table(near_table), batch.for_table(far_table).for_entries(entries)
    positions, sequence, most = batch.positions, batch.once("inferplane_cpu.sequences", list_sequences, batch), 0
    last = positions[:, None]
    first = (last + 1 - view.kv.window).clamp(min=0)
    numbers = torch.minimum(first + torch.arange(min(view.kv.window, batch.max_seq_tokens)), last)
    slots = gather_slots(near, window.block_tokens, numbers, sequence)
    if chosen is None:
        counts, most = (positions + 1) // view.compressed.rate, far.max_seq_tokens
        chosen = torch.arange(most).expand(len(q), -1)
    else:
        counts, most = (chosen >= 0).sum(1), chosen.shape[1]
    seen = (last - first)[:, 0] + 1
    gathered = window.entries[0][slots.flatten()].view(*slots.shape, -1)  # type: ignore[attr-defined]
    if most:
        others = gather_slots(far, entries.block_tokens, chosen.clamp(min=0).long(), sequence)
        more = entries.entries[0][others.flatten()].view(*others.shape, -1)  # type: ignore[attr-defined]
        width = slots.shape[1]
        gathered = torch.cat((gathered, more), 1)
        if bool((seen < width).any()):  # then entries of the window end before those of others begin
            place = torch.arange(width + most)
            place = torch.where(place < seen[:, None], place, place - seen[:, None] + width).clamp(max=width + most - 1)
            gathered = gathered.take_along_dim(place[..., None], 1)
    total, size = gathered.shape[1], gathered.stride(1)
    starts, lens = torch.arange(len(q) + 1, dtype=torch.int32), (seen + counts).int()
    tables = torch.arange(len(q), dtype=torch.int32)
    address = gathered.data_ptr()
    each = RaggedBatch(starts.data_ptr(), lens.data_ptr(), tables.data_ptr(), len(q), 1)
    return _attend(view, q, each, Cache(address, address, size, size, block=total), 0)
