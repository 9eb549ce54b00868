"""The caches of a layer that reads compressed entries beside a window: each part lies in blocks of its own table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from inferplane.types.batch import Batch
    from inferplane.types.kv import LayerKV

ConvertKV = Callable[["LayerKV", int], "LayerKV"]
"""What a layer keeps, and the number of its block table -> what stands for it."""


class CachePart(NamedTuple):
    """What a layer keeps of tokens, and the number of the block table in which it lies."""

    kv: LayerKV
    table: int = 0


class CompressorCache(NamedTuple):
    """What a compressor keeps: `rows` of the last tokens, from which it makes `entries`, one for several tokens."""

    rows: CachePart
    entries: CachePart

    def list_parts(self) -> list[CachePart]:
        """All parts, in order."""
        return list(self)

    def convert(self, convert_kv: ConvertKV) -> CompressorCache:
        """The same parts with other caches, made in order."""
        return CompressorCache(*(part._replace(kv=convert_kv(*part)) for part in self))


class CompressedCache(NamedTuple):
    """The caches of a layer that reads a window of tokens and compressed entries of all before.

    Fields: `window` the entries of the last tokens; `main` the compressor of what attention reads; `index_keys` that of
    those by which the layer chooses among compressed entries; None where it reads all of them.
    """

    window: CachePart
    main: CompressorCache
    index_keys: CompressorCache | None = None

    def list_parts(self) -> list[CachePart]:
        """All parts, in order."""
        return [self.window, *self.main, *(self.index_keys or ())]

    def convert(self, convert_kv: ConvertKV) -> CompressedCache:
        """The same parts with other caches, made in order."""
        window = self.window._replace(kv=convert_kv(*self.window))
        main = self.main.convert(convert_kv)
        return CompressedCache(window, main, None if self.index_keys is None else self.index_keys.convert(convert_kv))


def join_parts(parts: Sequence[CachePart]) -> CompressedCache:
    """The cache of a layer from its parts, in the order of `CompressedCache.list_parts`."""
    window, rows, entries, *index = parts
    return CompressedCache(window, CompressorCache(rows, entries), CompressorCache(*index) if index else None)


def count_entries(batch: Batch, kv: LayerKV, covered: int) -> Batch:
    """The step as `Batch.for_entries` describes it.

    Args:
        batch: in the cache's block table. kv: a cache whose entries stand for several tokens.
        covered: tokens of a sequence that a block is for.
    """
    rate, tables, lens = kv.request.rate, batch.block_tables, batch.host_lens
    ends = (batch.slots >= 0) & ((batch.positions + 1) % rate == 0)
    slots = batch.slots // covered * kv.block_tokens + batch.slots % covered // rate
    if covered < rate:  # the block of an entry is that of its last token
        last = torch.arange(1, max(1, tables.shape[1] * covered // rate) + 1, device=tables.device) * rate - 1
        tables = tables[:, (last // covered).clamp(max=tables.shape[1] - 1)]
    return replace(
        batch,
        slots=torch.where(ends, slots, -1),
        seq_lens=batch.seq_lens // rate,
        block_tables=tables,
        max_seq_tokens=batch.max_seq_tokens // rate,
        host_lens=lens and replace(lens, seq_lens=tuple(n // rate for n in lens.seq_lens)),
        few=batch.few and batch.few.for_entries(kv),
        many=batch.many and batch.many.for_entries(kv),
        more_tables=(),
    )
