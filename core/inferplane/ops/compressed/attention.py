"""Attention of one KV head over a window of its entries, each of which is key and value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.attention import OTHER_SCALE, Queries, mask_pairs
from inferplane.ops.draw import Sequences, step_inputs
from inferplane.ops.op import ACCUMULATED, Cost, Op, Sample, Workload, placeholder, values
from inferplane.types import Batch, KVRequest, LayerKV, Weight


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
