"""Experts with biases and a clamped gate, as in gpt-oss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.ops.draw import Draw
from inferplane.ops.op import BLOCK, Op, Sample, expert_values, placeholder, values
from inferplane.types import HOST, Weight


class ClampedExperts(Op, name="clamped_experts", hot=True, extension=True):
    """The chosen experts' clamped MLPs: `y[t] = sum_j weights[t, j] (down_e h + down_bias_e)`, `e = ids[t, j]`, with
    `g, u = gate_up_e x + gate_up_bias_e`, `g' = min(g, limit)`, `u' = clamp(u, -limit, limit)` and
    `h = (u' + 1) g' sigmoid(alpha g')`.

    Rows of `gate_up` alternate: gate, up, gate, up, ... Sums in float32, rounded once. Only chosen experts are read;
    counts stay on the device. With `partial`, an id of -1 is an expert on another rank and adds nothing. `MoE`, which
    knows the number of experts per token, counts the cost.

    Args of the call:
        x: `[T, D]`. weights: float32 `[T, k]`. ids: int64 `[T, k]`.

    Returns:
        `[T, D]` in the dtype of `x`.

    Fields: `gate_up` `[E, 2 I, D]`, `gate_up_bias` `[E, 2 I]`, `down` `[E, D, I]`: stacked, read from per-expert names;
    `down_bias` `[E, D]`, or None on ranks whose results are added to that of a rank which has it; `alpha`; `limit`;
    `partial` if other ranks have further experts.

    Source: the gpt-oss model card, arXiv 2508.10925.
    """

    tolerance = BLOCK

    gate_up: Weight
    gate_up_bias: Weight
    down: Weight
    down_bias: Weight | None
    alpha: float
    limit: float
    partial: bool = False

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        bias = values(self.gate_up_bias)  # type: ignore[arg-type]
        for e in ids.unique().to(HOST).tolist():
            if e < 0:
                continue
            token, j = torch.where(ids == e)
            h = clamp_gate(F.linear(x[token].float(), expert_values(self.gate_up, e), bias[e]), self.alpha, self.limit)
            y = F.linear(h, expert_values(self.down, e))
            if self.down_bias is not None:
                y = y + values(self.down_bias)[e]  # type: ignore[arg-type]
            out.index_add_(0, token, y * weights[token, j, None])
        return out.to(x.dtype)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One token, several; without a second bias; each kind of weight format; experts on other ranks."""

        def inputs(t: int, k: int, width: int = 64, first: int = 0) -> Any:
            def draw_inputs(d: Draw) -> tuple[Any, ...]:
                ids = torch.stack([torch.tensor(d.permutation(5 + first)[:k]) for _ in range(t)]).to(d.device)
                return d.normal(t, width), d.uniform(t, k, low=0.1), (ids - first).clamp_min(-1)

            return draw_inputs

        def experts(format: str = "plain", inner: int = 48, width: int = 64, bias: bool = True) -> ClampedExperts:
            return ClampedExperts(
                placeholder(6, 2 * inner, width, format=format),
                placeholder(6, 2 * inner),
                placeholder(6, width, inner, format=format),
                placeholder(6, width) if bias else None,
                alpha=1.702,
                limit=0.8,  # many gates and many of what they multiply lie beyond it
            )

        return [
            Sample("t1", experts(), inputs(1, 2), "decode"),
            Sample("t13", experts(inner=45), inputs(13, 3)),
            Sample("no_down_bias", experts(bias=False), inputs(6, 4)),
            Sample("wide_limit", replace(experts(), limit=7.0, alpha=1.1), inputs(5, 2)),
            Sample("mxfp4", experts("mxfp4", 64, 96), inputs(7, 2, 96)),
            Sample("int8_group", experts("int8_group"), inputs(5, 2)),
            Sample("int4_group32", experts("int4_group32", 64), inputs(5, 2)),
            Sample("partial", replace(experts(), partial=True), inputs(9, 3, first=4)),
        ]


def clamp_gate(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The gated result `(u' + 1) g' sigmoid(alpha g')` of `ClampedExperts`.

    Args:
        gate_up: `[T, 2 I]`; columns alternate: gate, up, ...
        alpha: factor of the gate in the sigmoid.
        limit: bound of the gate from above, and of the other column from both sides.

    Returns:
        `[T, I]` in the dtype of `gate_up`.
    """
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)
