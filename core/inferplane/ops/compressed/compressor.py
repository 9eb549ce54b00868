"""The compressor: rows of each token, and entries that it makes of those of several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferplane.ops.basic import RMSNorm, Rope, rope_table
from inferplane.ops.compressed.draw import draw_caches
from inferplane.ops.compressed.rotation import EntryWrite, TailRope
from inferplane.ops.draw import Draw, Sequences
from inferplane.ops.linear import Linear
from inferplane.ops.op import ACCUMULATED, BLOCK, Cost, Op, Sample, Workload, placeholder, values
from inferplane.ops.sparse.indexer import RotateIndexKeys
from inferplane.types import Batch, CompressorCache, KVRequest, LayerKV, StepKind, Weight


@dataclass(frozen=True)
class CompressorDims:
    """Sizes of a compressor.

    Args:
        dim: entries of what it makes D.
        rate: tokens r that one stands for.
        overlaps: whether it is made of the rows of 2 r tokens: those it stands for and those before.
        rope: the last entries, which are rotated.
        of_index: whether it makes index keys.
    """

    dim: int
    rate: int
    overlaps: bool
    rope: int
    of_index: bool = False

    @property
    def series(self) -> int:
        """Numbers of each kind in a token's row: D, or 2 D where the rows of a token are used twice."""
        return self.dim * (2 if self.overlaps else 1)

    @property
    def rows(self) -> KVRequest:
        """The cache request of rows `[values | gates]`."""
        span = self.rate * (2 if self.overlaps else 1)
        return KVRequest("index_rows" if self.of_index else "compressor_rows", 1, 2 * self.series, window=span)

    @property
    def entries(self) -> KVRequest:
        """The cache request of what it makes."""
        return KVRequest("index_keys" if self.of_index else "shared_kv", 1, self.dim, rope=self.rope, rate=self.rate)


class CompressRows(Op, name="compress_rows", hot=True):
    """For each token that is the last of r tokens, the weighted mean of their rows: `sum_j softmax_j(g_j + b_j) v_j`,
    entry by entry, in float32, rounded once.

    A row is `[v | g]`. Without an overlap j are the r tokens. With one a row has two series, `v = [v_a | v_b]` and
    `g = [g_a | g_b]`, and so has the bias b; j are the second series of the r tokens and the first of the r before,
    which the first entry of a sequence lacks.

    Args of the call:
        rows: `[T, 2 D]` or `[T, 4 D]`, the step's own rows, which are already in the cache.
        batch: the step. kv: the cache of rows, in this batch's block table.

    Returns:
        `[T, D]` in the dtype of `rows`; zero for tokens that are not the last of r.

    Fields: `bias` float32 `[r, D]`, or `[r, 2 D]` with an overlap, by the place of a token among its r; `dims`; `kv`
    the request of rows.

    Source: DeepSeek-V4 (2026), sections 2.3.1, equations 9 to 12, and 2.3.2, equations 20 to 23.
    """

    tolerance = ACCUMULATED

    bias: Weight
    dims: CompressorDims
    kv: KVRequest

    def __call__(self, rows: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        d, span = self.dims, self.kv.window or 1
        bias, out = values(self.bias), rows.new_zeros(rows.shape[0], self.dims.dim)  # type: ignore[arg-type]
        for a, b, n, table in batch.rows():
            skipped = self.kv.blocks_before_window(b - a, n, kv.block_tokens)
            first = skipped * kv.block_tokens
            stored = kv.read(table[skipped:], n - first)[0]
            for last in list_lasts(b - a, n, d.rate):
                made = compress(stored[max(0, last + 1 - span - first) : last + 1 - first], bias, d)
                out[b - n + last] = made.to(out.dtype)
        return out

    def cost(self, load: Workload) -> Cost:
        """Bytes of the rows read once for each entry; an exponential and two multiply-adds a number."""
        numbers = load.tokens / self.dims.rate * (self.kv.window or 1) * self.dims.dim
        return Cost(2 * numbers * load.dtype.itemsize, 6 * numbers)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode, drafts, prefill and chunks, with entries at each place of a step; with and without an overlap; the
        first entry; V4's own sizes."""
        small, plain = CompressorDims(32, 4, True, 16), CompressorDims(32, 64, False, 16)
        real, heavy = CompressorDims(512, 4, True, 64), CompressorDims(512, 128, False, 64)

        def sample(label: str, d: CompressorDims, sequences: Sequences, kind: StepKind) -> Sample:
            def inputs(draw: Draw) -> tuple[Any, ...]:
                batch, kv = draw.step(d.rows, sequences, written=True)
                return read_own_rows(batch, kv), batch, kv

            return Sample(label, CompressRows(make_bias(d), d, d.rows), inputs, kind)

        return [
            sample("decode", small, [(1, 7), (1, 90), (1, 3)], "decode"),
            sample("drafts", small, [(1, 0), (8, 64), (5, 126), (4, 0)], "decode"),
            sample("mixed", small, [(1, 43), (20, 0), (33, 90)], "mixed"),
            sample("plain_decode", plain, [(1, 63), (3, 126), (1, 64)], "decode"),
            sample("plain_mixed", plain, [(1, 127), (150, 0), (64, 70)], "mixed"),
            sample("v4_decode", real, [(1, 127), (4, 70)], "decode"),
            sample("v4_heavy", heavy, [(2, 126), (1, 255), (1, 130)], "decode"),
        ]


def list_lasts(query_tokens: int, tokens: int, rate: int) -> range:
    """The positions, among the last `query_tokens` tokens of a sequence, of those that are the last of `rate`."""
    first = tokens - query_tokens
    return range(first + (rate - 1 - first) % rate, tokens, rate)


def compress(rows: torch.Tensor, bias: torch.Tensor, d: CompressorDims) -> torch.Tensor:
    """The weighted mean of the rows of r tokens, and with an overlap of those before, if there are any, float32 `[D]`.

    Args:
        rows: `[r, 2 D]`, or `[r or 2 r, 4 D]`. bias: float32 `[r, D]` or `[r, 2 D]`.
        d: sizes.
    """
    v, g = rows.float().split(d.series, -1)
    own_v, own_g = v[-d.rate :], g[-d.rate :] + bias
    if d.overlaps:
        before_v, before_g = v[: -d.rate, : d.dim], g[: -d.rate, : d.dim] + bias[: len(g) - d.rate, : d.dim]
        own_v = torch.cat((before_v, own_v[:, d.dim :]))
        own_g = torch.cat((before_g, own_g[:, d.dim :]))
    return (own_g.softmax(0) * own_v).sum(0)


class CompressAndWrite(Op, name="compress_and_write"):
    """Make the entries that the step's tokens complete and store them: `write(rope(norm(compress(rows))))`.

    An entry is rotated at the position of the first token that it stands for. With `spread`, which index keys of 8 bits
    have, it is applied last.

    Args of the call:
        rows: `[T, 2 D]` or `[T, 4 D]`, the step's own rows, which are already in the cache.
        batch: the step, with the block tables of both parts. cache: the rows, and the entries, changed.

    Returns:
        None.

    Source: DeepSeek-V4 (2026), section 2.3.
    """

    tolerance = BLOCK
    writes_cache = True

    compress: CompressRows
    norm: RMSNorm
    rope: TailRope
    write: EntryWrite
    dims: CompressorDims
    spread: RotateIndexKeys | None = None

    def __call__(self, rows: torch.Tensor, batch: Batch, cache: CompressorCache) -> None:
        made = self.norm(self.compress(rows, batch.for_table(cache.rows.table), cache.rows.kv))
        made = self.rope(made[:, None], (batch.positions + 1 - self.dims.rate).clamp(min=0))
        if self.spread is not None:
            made = self.spread(made)
        self.write(made[:, 0], batch.for_table(cache.entries.table), cache.entries.kv)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """As of `compress_rows`; entries and index keys; spread keys."""
        small, plain = CompressorDims(48, 4, True, 16), CompressorDims(48, 64, False, 16)
        keys, heavy = CompressorDims(32, 4, True, 16, True), CompressorDims(512, 128, False, 64)

        def sample(label: str, d: CompressorDims, sequences: Sequences, kind: StepKind, *, spread: int = 0) -> Sample:
            def inputs(draw: Draw) -> tuple[Any, ...]:
                batch, (rows, entries) = draw_caches(draw, [(d.rows, True), (d.entries, False)], sequences)
                own = read_own_rows(batch.for_table(rows.table), rows.kv)
                return own, batch, CompressorCache(rows, entries)

            return Sample(label, make_compress(d, spread), inputs, kind)

        return [
            sample("decode", small, [(1, 7), (1, 90), (1, 3)], "decode"),
            sample("drafts", small, [(1, 0), (8, 64), (5, 126), (4, 0)], "decode"),
            sample("mixed", small, [(1, 43), (20, 0), (33, 90)], "mixed"),
            sample("plain_decode", plain, [(1, 63), (3, 126), (1, 24)], "decode"),
            sample("plain_mixed", plain, [(1, 127), (150, 0), (64, 70)], "mixed"),
            sample("keys", keys, [(1, 7), (5, 90)], "decode"),
            sample("keys_spread", keys, [(1, 7), (5, 90)], "decode", spread=32),
            sample("v4_heavy", heavy, [(2, 126), (1, 255), (1, 130)], "decode"),
        ]


class Compressor(Op, name="compressor"):
    """The rows of each token, their cache write, and the entries that the step's tokens complete.

    Args of the call:
        x: `[T, W]`. batch: the step, with the block tables of both parts. cache: the rows and the entries, changed.

    Returns:
        None.

    Fields: `project` linear to rows `[v | g]`; `write`; `compress`.

    Source: DeepSeek-V4 (2026), section 2.3.
    """

    tolerance = BLOCK
    writes_cache = True

    project: Linear
    write: EntryWrite
    compress: CompressAndWrite

    def __call__(self, x: torch.Tensor, batch: Batch, cache: CompressorCache) -> None:
        rows = self.project(x)
        self.write(rows, batch.for_table(cache.rows.table), cache.rows.kv)
        self.compress(rows, batch, cache)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps, with and without an overlap."""
        small, plain = CompressorDims(48, 4, True, 16), CompressorDims(48, 64, False, 16)

        def sample(label: str, d: CompressorDims, sequences: Sequences, kind: StepKind) -> Sample:
            def inputs(draw: Draw) -> tuple[Any, ...]:
                batch, (rows, entries) = draw_caches(draw, [(d.rows, False), (d.entries, False)], sequences)
                return draw.normal(batch.tokens, 64), batch, CompressorCache(rows, entries)

            return Sample(label, make_compressor(d), inputs, kind)

        return [
            sample("decode", small, [(1, 7), (5, 90), (1, 3)], "decode"),
            sample("mixed", small, [(1, 43), (20, 0), (33, 90)], "mixed"),
            sample("plain_decode", plain, [(1, 63), (3, 126), (1, 24)], "decode"),
            sample("plain_mixed", plain, [(1, 127), (150, 0), (64, 70)], "mixed"),
        ]


def read_own_rows(batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The rows of a step's tokens, which are in the cache, for samples."""
    rows = [kv.read(table, n)[0][n - (b - a) :] for a, b, n, table in batch.rows()]
    return torch.cat(rows)


def make_bias(d: CompressorDims) -> Weight:
    """A bias for samples."""
    return placeholder(d.rate, d.series, dtype=torch.float32)


def make_compress(d: CompressorDims, spread: int = 0) -> CompressAndWrite:
    """The step from rows to entries, for samples."""
    return CompressAndWrite(
        CompressRows(make_bias(d), d, d.rows),
        RMSNorm(placeholder(d.dim), 1e-6),
        TailRope(Rope(rope_table(d.rope), True), d.rope),
        EntryWrite(d.entries),
        d,
        RotateIndexKeys(spread) if spread else None,
    )


def make_compressor(d: CompressorDims, width: int = 64) -> Compressor:
    """A compressor, for samples."""
    return Compressor(Linear(placeholder(2 * d.series, width)), EntryWrite(d.rows), make_compress(d))
