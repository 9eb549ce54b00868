"""GPTQ: columns are rounded one after the other, and the error of each is made up for by those that follow.

Source: Frantar et al., arXiv 2210.17323; order of columns and groups that are fixed before as in its later releases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferplane.calibrate.methods.rounding import BY_MINIMUM, Grid, make_grid, round_to_nearest, search_scales
from inferplane.types import QTensor

BLOCK = 128
DAMPING = (0.01, 0.1, 1.0)
"""Shares of the mean diagonal that are added to it, one after the other until the matrix is positive definite."""


class Hessian:
    """The sum of `x x^T` over the inputs of a product.

    Args:
        columns: K.

    Attributes: `total`, float32 `[K, K]`; `rows`, their number.
    """

    def __init__(self, columns: int) -> None:
        self.total, self.rows = torch.zeros(columns, columns), 0.0

    def add(self, x: torch.Tensor) -> None:
        """Add inputs `[T, K]`."""
        self.total.addmm_(x.T, x)
        self.rows += len(x)

    def include(self, other: Hessian, share: float) -> None:
        """Add another one, with this weight."""
        self.total.add_(other.total, alpha=share)
        self.rows += other.rows * share

    def divide(self, scale: torch.Tensor) -> None:
        """As if columns had been divided by `scale` `[K]`."""
        self.total.div_(scale).div_(scale[:, None])


@dataclass(frozen=True)
class Rounded:
    """A rounded weight.

    Args:
        weight: `[N, K]`.
        damping: share of the mean diagonal that was added; None: no share sufficed, and it is rounded to nearest.
    """

    weight: QTensor
    damping: float | None


def gptq(weight: torch.Tensor, hessian: Hessian, format: str, *, act_order: bool = True) -> Rounded:
    """Round a weight so that its products with the inputs change least.

    Scales are those with the smallest error, weighed by the inputs' power (`search_scales`), and are fixed before the
    first column is rounded: so groups stay in the order of columns whatever the order of rounding. Columns whose inputs
    were all 0 are rounded to nearest.

    Args:
        weight: `[N, K]` float32.
        hessian: of its inputs.
        format: a name of `FORMATS`.
        act_order: round the columns with the most power first.
    """
    if format in BY_MINIMUM:
        return Rounded(round_to_nearest(weight, format), None)
    grid = make_grid(format, (weight.shape[0], weight.shape[1]))
    power = hessian.total.diagonal().clone()
    scale = search_scales(grid, weight, power / power.mean().clamp_min(1e-30) + 1e-6)
    order = torch.argsort(power, descending=True, stable=True) if act_order else torch.arange(len(power))
    upper, damping = _invert(hessian.total[order][:, order], power[order])
    wide = grid.expand(scale)[:, order]
    if upper is None:
        return Rounded(grid.make(grid.round(weight / grid.expand(scale)), scale), None)
    entries = torch.empty_like(weight)
    entries[:, order] = _round_columns(grid, weight[:, order].clone(), wide, upper)
    return Rounded(grid.make(entries, scale), damping)


def _invert(total: torch.Tensor, power: torch.Tensor) -> tuple[torch.Tensor | None, float | None]:
    """The upper Cholesky factor of the inverse, and the damping that it took."""
    mean = power.mean().item()
    for damping in DAMPING if mean > 0 else ():
        damped = total.double()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped  # of 8192 columns each matrix takes 0.5 GB
        if failed:
            continue
        inverse = torch.cholesky_inverse(lower)
        del lower
        upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        del inverse
        if not failed and upper.isfinite().all():
            return upper.float(), damping
    return None, None


def _round_columns(grid: Grid, weight: torch.Tensor, wide: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Entries `[N, K]`; changes `weight`, whose columns are in the order of rounding, as are those of `wide`."""
    entries, columns = torch.empty_like(weight), weight.shape[1]
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        block, factor = weight[:, first:last], upper[first:last, first:last]
        errors = torch.empty_like(block)
        for i in range(last - first):
            column, scale = block[:, i], wide[:, first + i]
            entry = grid.round(column / scale)
            entries[:, first + i] = entry
            error = (column - entry * scale) / factor[i, i]
            block[:, i + 1 :].addr_(error, factor[i, i + 1 :], alpha=-1)
            errors[:, i] = error
        weight[:, last:].addmm_(errors, upper[first:last, last:], alpha=-1)
    return entries
