"""The indexer of compressed attention: it has a compressor of its own, and chooses among compressed entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inferplane.ops.basic import Rope, rope_table
from inferplane.ops.compressed.compressor import Compressor, CompressorDims, make_compressor
from inferplane.ops.compressed.draw import draw_caches
from inferplane.ops.compressed.rotation import TailRope
from inferplane.ops.draw import Draw, Sequences
from inferplane.ops.linear import Linear
from inferplane.ops.op import Comparison, Op, Sample, placeholder
from inferplane.ops.sparse.indexer import SWAPPED, IndexDims, IndexSelect, RotateIndexKeys, write_few_keys
from inferplane.types import Batch, CompressorCache, StepKind, Weight


class CompressedIndexer(Op, name="compressed_indexer"):
    """Index queries and weights of each token, compressed index keys, and the selection among them.

    `compressor(x); q = rope(wq_b(c)); w = weights_proj(x) J^-1/2 E^-1/2; select(q, w)` over the keys that the query
    sees. The weights are in float32 throughout. With `spread`, which caches of 8 bits have, it is applied to q; the
    compressor applies it to keys.

    Args of the call:
        x: `[T, D]`, what the block reads. c: `[T, Q]`, the normed low-rank query of the block's attention.
        batch: the step, with the block tables of both parts. cache: rows and index keys, changed.

    Returns:
        int32 `[T, K]`, as of `index_select`.

    Source: DeepSeek-V4 (2026), section 2.3.1, equations 13 to 17.
    """

    tolerance = SWAPPED
    compares_entries = False

    compressor: Compressor
    wq_b: Linear
    weights_proj: Linear
    rope: TailRope
    select: IndexSelect
    dims: IndexDims
    spread: RotateIndexKeys | None = None

    def __call__(self, x: torch.Tensor, c: torch.Tensor, batch: Batch, cache: CompressorCache) -> torch.Tensor:
        d = self.dims
        self.compressor(x, batch, cache)
        q = self.rope(self.wq_b(c).view(x.shape[0], d.heads, d.dim), batch.positions)
        if self.spread is not None:
            q = self.spread(q)
        keys = cache.entries
        return self.select(q, self.weights_proj(x) * d.scale, batch.for_table(keys.table), keys.kv)

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """As of `index_select`."""
        return IndexSelect.compare(got, want)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps; contexts below and beyond K; spread keys. Rounding cannot swap positions."""
        small = IndexDims(8, 32, 16, 32)

        def sample(label: str, sequences: Sequences, kind: StepKind, *, spread: int = 0) -> Sample:
            op = make_compressed_indexer(small, 64, 40, spread)

            def inputs(draw: Draw) -> tuple[Any, ...]:
                return draw_index_inputs(draw, op, sequences)

            return Sample(label, op, inputs, kind)

        return [
            sample("decode", [(1, 400), (3, 20), (1, 2)], "decode"),
            sample("mixed", [(1, 150), (20, 0), (12, 300)], "mixed"),
            sample("spread", [(1, 400), (2, 40)], "decode", spread=32),
        ]


def draw_index_inputs(draw: Draw, op: CompressedIndexer, sequences: Sequences) -> tuple[Any, ...]:
    """Arguments of an indexer, in whose history most keys are zero (`write_few_keys`)."""
    compressor = op.compressor
    requests = [(compressor.write.kv, False), (compressor.compress.write.kv, False)]
    batch, (rows, keys) = draw_caches(draw, requests, sequences)
    write_few_keys(draw, keys.kv, int(batch.for_table(keys.table).block_tables.max()) + 1)
    return draw.normal(batch.tokens, 64).abs(), draw.normal(batch.tokens, 40), batch, CompressorCache(rows, keys)


def make_compressed_indexer(d: IndexDims, width: int, rank: int, spread: int = 0) -> CompressedIndexer:
    """An indexer for samples whose heads' weights are equal and positive where the entries of x are."""
    even = Weight((), (d.heads, width), torch.float32, make=lambda: torch.full((d.heads, width), 1 / width))
    dims = CompressorDims(d.dim, 4, True, d.rope, True)
    compressor = make_compressor(dims, width)
    if spread:
        compressor = replace(compressor, compress=replace(compressor.compress, spread=RotateIndexKeys(spread)))
    return CompressedIndexer(
        compressor=compressor,
        wq_b=Linear(placeholder(d.heads * d.dim, rank)),
        weights_proj=Linear(even, out_dtype=torch.float32),
        rope=TailRope(Rope(rope_table(d.rope), True), d.rope),
        select=IndexSelect(d, dims.entries, dims.rate),
        dims=d,
        spread=RotateIndexKeys(spread) if spread else None,
    )
