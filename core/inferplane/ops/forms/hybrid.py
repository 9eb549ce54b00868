"""A block with attention and a recurrence side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.attention import GQABlock
from inferplane.ops.draw import Draw
from inferplane.ops.op import BLOCK, Op, Sample
from inferplane.ops.recurrent.block import RecurrentBlock
from inferplane.types import Batch, HybridCache


class HybridBlock(Op, name="hybrid_block", extension=True):
    """Attention and a recurrence that read the same rows, each with a factor before and one after it.

    `y = attn(x * a) * b + recurrence(x * c) * d`, with `a, b = attn_factors; c, d = recurrence_factors`.

    Args of the call:
        x: `[T, D]`. batch: the step, with state slots. kv: the layer's `HybridCache`, changed.

    Returns:
        `[T, D]` in the dtype of `x`; padded rows are undefined.

    Source: Falcon-H1, arXiv 2507.22448.
    """

    tolerance = BLOCK

    attn: GQABlock
    recurrence: RecurrentBlock
    attn_factors: tuple[float, float]
    recurrence_factors: tuple[float, float]

    def __call__(self, x: torch.Tensor, batch: Batch, kv: HybridCache) -> torch.Tensor:
        (a, b), (c, d) = self.attn_factors, self.recurrence_factors
        attended = self.attn(x if a == 1 else x * a, batch, kv.kv)
        recalled = self.recurrence(x if c == 1 else x * c, batch, kv.states)
        return (attended.float() * b + recalled.float() * d).to(x.dtype)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps, with factors and without."""
        return [_sample("decode", (1.0, 1.0), (1.0, 1.0)), _sample("mixed", (0.7, 1.3), (1.2, 0.6))]


def _sample(like: str, attn_factors: tuple[float, float], recurrence_factors: tuple[float, float]) -> Sample:
    """A sample around that of grouped-query attention."""
    block = next(s for s in GQABlock.samples() if s.label == like)
    recurrence: Any = next(s.op for s in RecurrentBlock.samples() if s.label == "gated_delta_net_decode")
    (request,) = recurrence.state_requests()

    def inputs(d: Draw) -> tuple[Any, ...]:
        x, batch, kv = block.inputs(d)
        n = batch.seq_lens.shape[0]
        return x, batch.with_states(d.state_slots(n)), HybridCache(kv, d.fill_states(request, n))

    op = HybridBlock(block.op, recurrence, attn_factors, recurrence_factors)  # type: ignore[arg-type]
    return Sample(like, op, inputs, block.step_kind)
