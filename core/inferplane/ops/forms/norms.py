"""Norms besides the RMS norm over the last dimension: layer norm, and a norm over all heads together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.ops.basic import RMSNorm
from inferplane.ops.collective import AllReduce
from inferplane.ops.op import ROUNDED, Cost, Op, Sample, Workload, placeholder, values
from inferplane.types import Weight


class LayerNorm(Op, name="layer_norm", extension=True):
    """`y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension, in float32, rounded once.

    The variance is that of the entries themselves (divided by D).

    Args of the call:
        x: `[..., D]` in the plan's dtype; rows may be strided.

    Returns:
        The shape and dtype of `x`.

    Fields: `weight` `[D]`, or `[H, D]` with one row for each head of an `x` `[T, H, D]`; `eps` added to the variance;
    `bias` `[D]` or None; `offset` is added to the weight, 0 or 1.

    Source: Ba et al., arXiv 1607.06450; without a bias as in Cohere's Command R.
    """

    tolerance = ROUNDED

    weight: Weight
    eps: float
    bias: Weight | None = None
    offset: float = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h - h.mean(-1, keepdim=True)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        h = h * (values(self.weight) + self.offset)  # type: ignore[arg-type]
        return (h if self.bias is None else h + values(self.bias)).to(x.dtype)  # type: ignore[arg-type]

    def cost(self, load: Workload) -> Cost:
        """Bytes of one read and one write."""
        return _cost(load, _entries(self.weight))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """With and without a bias, with an offset, a weight by head, rows whose mean is far from 0."""
        return [
            Sample("t3_d64", LayerNorm(placeholder(64), 1e-5), lambda d: (d.normal(3, 64),)),
            Sample("bias", LayerNorm(placeholder(97), 1e-5, placeholder(97)), lambda d: (d.normal(4, 97) + 3,)),
            Sample("offset", LayerNorm(placeholder(64), 1e-5, offset=1.0), lambda d: (d.normal(2, 64),)),
            Sample("heads", LayerNorm(placeholder(3, 40), 1e-5), lambda d: (d.normal(5, 3, 40),)),
        ]


class WidthRMSNorm(Op, name="width_rms_norm", extension=True):
    """An RMS norm over the entries of all heads together: `y = x / sqrt(mean(x^2) + eps) * weight`, in float32,
    rounded once. If the heads are divided over ranks, the mean is that over all ranks.

    Args of the call:
        x: `[T, H, d]` in the plan's dtype, this rank's heads; may be strided.

    Returns:
        `[T, H, d]` in the dtype of `x`.

    Fields: `weight` `[H d]`; `eps` added to the mean of squares; `width` entries of all ranks' heads; `reduce` sums
    over ranks.

    Source: norms on queries and keys of OLMo 2, arXiv 2501.00656.
    """

    tolerance = ROUNDED

    weight: Weight
    eps: float
    width: int
    reduce: AllReduce | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        total = h.pow(2).sum((-2, -1), keepdim=True)
        if self.reduce is not None:
            total = self.reduce(total)
        h = h * torch.rsqrt(total / self.width + self.eps)
        return (h * values(self.weight).view(h.shape[1:])).to(x.dtype)  # type: ignore[arg-type]

    def cost(self, load: Workload) -> Cost:
        """Bytes of one read and one write."""
        return _cost(load, _entries(self.weight))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Several heads and one, strided rows, values near `eps`."""
        at = lambda h, d: WidthRMSNorm(placeholder(h * d), 1e-6, h * d)  # noqa: E731
        return [
            Sample("h4_d32", at(4, 32), lambda d: (d.normal(3, 4, 32),)),
            Sample("h1_d40", at(1, 40), lambda d: (d.normal(7, 1, 40),)),
            Sample("strided", at(3, 24), lambda d: (d.normal(5, 9, 24)[:, 2:5],)),
            Sample("small", at(2, 32), lambda d: (d.normal(4, 2, 32, scale=1e-3),)),
        ]


Norm = RMSNorm | LayerNorm
"""A norm over the last dimension."""


class AddNorm(Op, name="add_norm", extension=True):
    """`s = x + residual; return norm(s), s`, with a layer norm. Without a residual (the first layer) `s = x`.

    Args of the call:
        x: `[T, D]`.
        residual: `[T, D]` or None.

    Returns:
        The normed sum and the sum, each `[T, D]` in the dtype of `x`. Neither input is changed.

    Fields: `norm`.

    Source: pre-norm transformer (arXiv 2002.04745), addition folded into the norm.
    """

    tolerance = ROUNDED

    norm: LayerNorm

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        s = x if residual is None else x + residual
        return self.norm(s), s

    def cost(self, load: Workload) -> Cost:
        """Bytes of two reads and two writes."""
        n = self.norm.weight.shape[-1]
        return Cost(4 * load.tokens * n * load.dtype.itemsize, 5.0 * load.tokens * n)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """With and without a residual, with and without a bias."""
        at = lambda *bias: AddNorm(LayerNorm(placeholder(64), 1e-5, *bias))  # noqa: E731
        return [
            Sample("first", at(), lambda d: (d.normal(2, 64), None)),
            Sample("t3_d64", at(), lambda d: (d.normal(3, 64), d.normal(3, 64))),
            Sample("bias", at(placeholder(64)), lambda d: (d.normal(3, 64), d.normal(3, 64))),
        ]


def _entries(weight: Weight) -> int:
    """Entries of a norm's weight, which are those of a row."""
    return weight.shape[0] * (weight.shape[1] if len(weight.shape) > 1 else 1)


def _cost(load: Workload, entries: int) -> Cost:
    """Bytes of one read and one write of rows of so many entries."""
    return Cost(2 * load.tokens * entries * load.dtype.itemsize, 5.0 * load.tokens * entries)
