"""From logits to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.draw import Draw
from inferplane.ops.op import Comparison, Cost, Load, Op, Sample


class SampleTokens(Op, name="sample"):
    """Draw one token a row: temperature, then top-k, then top-p, then min-p, by inverting the cumulative distribution.

    With temperature 0 the row's largest logit wins (the lowest id among equals). Otherwise tokens are ordered by
    probability; the first `top_k` stay; of these the shortest head whose probability reaches `top_p`; of these the
    tokens with at least `min_p` of the largest probability; and the first whose share of the cumulated sum exceeds
    `uniform` is taken. Given `uniform`, the result is a function of the row alone, whatever the batch.

    Args of the call:
        logits: float32 `[R, V]`. temperature: float32 `[R]`. top_k: int64 `[R]`, 0 for all. top_p: float32 `[R]`.
        min_p: float32 `[R]`. uniform: float32 `[R]` in [0, 1).

    Returns:
        ids int64 `[R]`.

    Source: top-k, arXiv 1805.04833; nucleus, arXiv 1904.09751; min-p, arXiv 2407.01082.
    """

    tolerance = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        greedy = temperature <= 0
        best = logits.argmax(-1)
        heat = torch.where(greedy, torch.ones_like(temperature), temperature)
        p, ids = (logits.float() / heat[:, None]).softmax(-1).sort(stable=True, dim=-1, descending=True)
        place = torch.arange(p.shape[-1], device=p.device)[None]
        keep = (top_k[:, None] <= 0) | (place < top_k[:, None])
        p = p * keep
        before = p.cumsum(-1) - p
        keep = (before < top_p[:, None] * p.sum(-1, keepdim=True)) & (p >= min_p[:, None] * p[:, :1])
        keep[:, 0] = True
        total = (p * keep).cumsum(-1)
        chosen = (total > uniform[:, None] * total[:, -1:]).int().argmax(-1, keepdim=True)
        return torch.where(greedy, best, ids.gather(1, chosen)[:, 0])

    def cost(self, load: Load) -> Cost:
        """Not counted: small beside the head."""
        return Cost()

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """The share of rows with another token."""
        if tuple(got.shape) != tuple(want.shape):
            return Comparison(float("inf"), f"shape {tuple(got.shape)}")
        return Comparison((got.long() != want.long()).float().mean().item(), "share of rows that differ")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Greedy rows, and each cut alone and together."""

        def inputs(rows: int, greedy: bool) -> Any:
            def draw_inputs(d: Draw) -> tuple[Any, ...]:
                logits = d.normal(rows, 200, scale=3.0, dtype=torch.float32)
                if greedy:
                    zero = d.uniform(rows) * 0
                    return logits, zero, zero.long(), zero + 1, zero, d.uniform(rows)
                heat, cut = d.uniform(rows, low=0.3, high=1.5), d.ints(rows, below=20)
                return logits, heat, cut, d.uniform(rows, low=0.2), d.uniform(rows, high=0.1), d.uniform(rows)

            return draw_inputs

        op = SampleTokens()
        return [Sample("greedy", op, inputs(3, True), "decode"), Sample("cuts", op, inputs(32, False), "decode")]
