"""Attention of one KV head, whose entries are keys and values: over a window, and over compressed entries too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inferplane.ops.attention import OTHER_SCALE, Queries, mask_pairs
from inferplane.ops.compressed.draw import draw_caches
from inferplane.ops.draw import Draw, Sequences, step_inputs
from inferplane.ops.op import ACCUMULATED, Cost, Op, Sample, Workload, placeholder, values
from inferplane.ops.sparse.attention import hide_others
from inferplane.ops.sparse.indexer import mask_entries
from inferplane.types import Batch, CompressedCache, CompressorCache, KVRequest, LayerKV, Weight


class SharedKVAttention(Op, name="shared_kv_attention", hot=True):
    """Causal attention of all heads over the entries c of one KV head, which are keys and values:
    `y = softmax([q c^T scale | sink]) [c | 0]`.

    A query at position p sees entries 0..p, or the last `window` of them. Each softmax has one more score, the head's
    sink, whose weight falls on no value. Softmax and sums in float32, rounded once. Blocks that lie entirely before all
    windows may hold anything and are never read (`KVRequest.blocks_before_window`).

    Args of the call:
        q: `[T, H, D]`, rotated, contiguous rows.
        batch: lengths, offsets and block tables; the step's own entries are already in the cache.
        kv: the layer's cache.

    Returns:
        `[T, H, D]` in the dtype of `q`, rotated as the entries are. Rows of padded sequences are undefined.

    Fields: `heads` query heads H; `scale`; `kv` the cache request; `sinks` float32 `[H]`; `queries` "few" if every
    sequence has at most 8 query tokens, else "many".

    Source: DeepSeek-V4 (2026), section 2.3; a learned sink a head: the gpt-oss model card, arXiv 2508.10925.
    """

    tolerance = ACCUMULATED

    heads: int
    scale: float
    kv: KVRequest
    sinks: Weight
    queries: Queries = "many"

    @property
    def serves_many_queries(self) -> bool:
        """See `Op.serves_many_queries`."""
        return self.queries == "many"

    def __call__(self, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        out = torch.zeros_like(q)
        for a, b, n, table in batch.rows():
            skipped = self.kv.blocks_before_window(b - a, n, kv.block_tokens)
            n -= skipped * kv.block_tokens
            c = kv.read(table[skipped:], n)[0].float()
            hidden = mask_pairs(b - a, n, self.kv.window, q.device)
            out[a:b] = attend_with_sinks(q[a:b], c, hidden, self.scale, values(self.sinks)).to(q.dtype)  # type: ignore[arg-type]
        return out

    def cost(self, load: Workload) -> Cost:
        """Bytes of the cache read once; two operations per multiply-add of scores and values."""
        moved = load.kv_tokens * self.kv.entries * load.dtype.itemsize
        return Cost(moved, 4.0 * load.pairs * self.heads * self.kv.dim)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Single tokens, drafts, prefill, chunks and mixtures; contexts below, at and beyond the window; a scale; V4's
        own sizes with few heads."""
        small, real = KVRequest("shared_kv", 1, 48, window=20, rope=16), KVRequest("shared_kv", 1, 512, window=128)
        unlimited = KVRequest("shared_kv", 1, 64, rope=32)

        def sample(
            label: str, request: KVRequest, heads: int, sequences: Sequences, queries: Queries, factor: float = 1.0
        ) -> Sample:
            def tensors(draw: Any, tokens: int) -> tuple[torch.Tensor]:
                return (draw.normal(tokens, heads, request.dim),)

            inputs = step_inputs(request, sequences, tensors, written=True)
            sinks = placeholder(heads, dtype=torch.float32)
            op = SharedKVAttention(heads, factor * request.dim**-0.5, request, sinks, queries)
            return Sample(label, op, inputs, "decode" if queries == "few" else "mixed")

        return [
            sample("decode", small, 4, [(1, 5), (1, 90)], "few"),
            sample("first_token", small, 4, [(1, 0)], "few"),
            sample("drafts", small, 6, [(1, 19), (1, 20), (3, 64), (8, 127)], "few"),
            sample("all_tokens", unlimited, 3, [(1, 5), (2, 90)], "few"),
            sample("v4_decode", real, 4, [(1, 200), (2, 127), (1, 128)], "few"),
            sample("scaled", small, 4, [(1, 5), (3, 90)], "few", OTHER_SCALE),
            sample("prefill", small, 4, [(70, 0), (19, 0)], "many"),
            sample("chunks", small, 4, [(9, 90), (33, 64), (64, 128)], "many"),
            sample("v4_chunks", real, 2, [(65, 0), (12, 130)], "many"),
        ]


class CompressedAttention(Op, name="compressed_attention", hot=True):
    """As `SharedKVAttention`, over the entries of a window and compressed entries e in one softmax:
    `y = softmax([q c^T scale | q e^T scale | sink]) [c | e | 0]`.

    Compressed entry i stands for `rate` tokens from `i * rate`. A query at position p sees the `(p + 1) // rate` first
    ones, or those among them that it chose.

    Args of the call:
        q: `[T, H, D]`, rotated, contiguous rows.
        chosen: int32 `[T, K]`, numbers of compressed entries that the query may see, each once, in any order, then -1;
            None: all of them.
        batch: the step, with the block tables of all parts; the step's own entries are already in the caches.
        cache: the layer's caches, of which the window and the compressed entries are read.

    Returns:
        `[T, H, D]` in the dtype of `q`, rotated as the entries are. Rows of padded sequences are undefined.

    Fields: as of `SharedKVAttention`; `compressed` the request of compressed entries; `top` is K, or 0 where all are
    read.

    Source: DeepSeek-V4 (2026), sections 2.3.1 and 2.3.2.
    """

    tolerance = ACCUMULATED

    heads: int
    scale: float
    kv: KVRequest
    compressed: KVRequest
    sinks: Weight
    top: int = 0
    queries: Queries = "many"

    @property
    def serves_many_queries(self) -> bool:
        """See `Op.serves_many_queries`."""
        return self.queries == "many"

    def __call__(
        self, q: torch.Tensor, chosen: torch.Tensor | None, batch: Batch, cache: CompressedCache
    ) -> torch.Tensor:
        near, far = batch.for_table(cache.window.table), batch.for_table(cache.compressed.entries.table)
        window, entries, out = cache.window.kv, cache.compressed.entries.kv, torch.zeros_like(q)
        near_tables, far_tables = near.block_tables, far.for_entries(entries).block_tables
        for i, (a, b, n) in batch.list_spans():
            skipped = self.kv.blocks_before_window(b - a, n, window.block_tokens)
            left = n - skipped * window.block_tokens
            c = window.read(near_tables[i, skipped:], left)[0].float()
            hidden = mask_pairs(b - a, left, self.kv.window, q.device)
            if count := n // self.compressed.rate:
                c = torch.cat((c, entries.read(far_tables[i], count)[0].float()))
                if chosen is None:
                    others = mask_entries(b - a, n, self.compressed.rate, q.device)
                else:
                    others = hide_others(chosen[a:b], count)
                hidden = torch.cat((hidden, others), -1)
            sinks = values(self.sinks)  # type: ignore[arg-type]
            out[a:b] = attend_with_sinks(q[a:b], c, hidden, self.scale, sinks).to(q.dtype)
        return out

    def cost(self, load: Workload) -> Cost:
        """Bytes of the cache read once; two operations per multiply-add of scores and values."""
        rate = self.compressed.rate
        pairs = min(load.pairs / rate, load.tokens * self.top) if self.top else load.pairs / rate
        near = min(load.pairs, load.tokens * (self.kv.window or load.pairs))
        moved = (min(load.kv_tokens, near) + min(load.kv_tokens / rate, pairs)) * self.kv.entries * load.dtype.itemsize
        return Cost(moved, 4.0 * (near + pairs) * self.heads * self.kv.dim)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """As of `shared_kv_attention`: all entries and chosen ones; sequences without any; V4's own sizes with few
        heads."""
        small = KVRequest("shared_kv", 1, 48, window=20, rope=16)
        real = KVRequest("shared_kv", 1, 512, window=128, rope=64)

        def sample(
            label: str,
            request: KVRequest,
            rate: int,
            heads: int,
            top: int,
            sequences: Sequences,
            queries: Queries,
            factor: float = 1.0,
        ) -> Sample:
            far = replace(request, window=None, rate=rate)
            sinks = placeholder(heads, dtype=torch.float32)
            op = CompressedAttention(heads, factor * request.dim**-0.5, request, far, sinks, top, queries)

            def inputs(draw: Draw) -> tuple[Any, ...]:
                batch, (window, entries) = draw_caches(draw, [(request, True), (far, True)], sequences)
                q = draw.normal(batch.tokens, heads, request.dim)
                chosen = draw_entries(draw, batch, rate, top) if top else None
                return q, chosen, batch, CompressedCache(window, CompressorCache(window, entries))

            return Sample(label, op, inputs, "decode" if queries == "few" else "mixed")

        return [
            sample("decode", small, 4, 4, 8, [(1, 5), (1, 90), (1, 2)], "few"),
            sample("first_token", small, 4, 4, 8, [(1, 0)], "few"),
            sample("drafts", small, 4, 6, 8, [(1, 19), (1, 20), (3, 64), (8, 127)], "few"),
            sample("all", small, 64, 4, 0, [(1, 63), (1, 62), (3, 64), (8, 127)], "few"),
            sample("v4_decode", real, 4, 4, 24, [(1, 200), (2, 127), (1, 128)], "few"),
            sample("v4_all", real, 128, 4, 0, [(1, 200), (2, 126), (1, 300)], "few"),
            sample("scaled", small, 4, 4, 8, [(1, 5), (3, 90)], "few", OTHER_SCALE),
            sample("prefill", small, 4, 4, 8, [(70, 0), (19, 0)], "many"),
            sample("chunks", small, 4, 4, 8, [(9, 90), (33, 64), (64, 128)], "many"),
            sample("all_chunks", small, 64, 4, 0, [(70, 0), (33, 64), (64, 140)], "many"),
            sample("v4_chunks", real, 4, 2, 24, [(65, 0), (12, 130)], "many"),
        ]


def draw_entries(draw: Draw, batch: Batch, rate: int, top: int) -> torch.Tensor:
    """Random compressed entries for each token of a step, in random order, then -1: int32 `[T, top]`."""
    rows = []
    for position in batch.positions.tolist():
        found = draw.permutation((position + 1) // rate)[:top]
        rows.append(found + [-1] * (top - len(found)))
    return torch.tensor(rows, dtype=torch.int32).to(draw.device)


def attend_with_sinks(
    q: torch.Tensor, c: torch.Tensor, hidden: torch.Tensor, scale: float, sinks: torch.Tensor
) -> torch.Tensor:
    """Attention of all heads over entries that are keys and values, with a sink a head, in float32.

    Args:
        q: `[Q, H, D]`. c: float32 `[n, D]`.
        hidden: bool `[Q, n]`, the entries that a query does not see.
        scale: of the scores. sinks: float32 `[H]`.

    Returns:
        float32 `[Q, H, D]`.
    """
    s = torch.einsum("qhd,kd->hqk", q.float(), c) * scale
    s = s.masked_fill(hidden, -torch.inf)
    s = torch.cat((s, sinks[:, None, None].expand(-1, q.shape[0], 1)), -1)
    return torch.einsum("hqk,kd->qhd", s.softmax(-1)[..., :-1], c)
