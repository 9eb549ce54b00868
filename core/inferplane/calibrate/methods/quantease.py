"""QuantEase: entries of a rounded weight are chosen anew one column after the other, and so are its scales.

Source: Behdin et al., arXiv 2309.01885, begun from what GPTQ gives; scales by least squares are our own addition.
"""

from __future__ import annotations

import torch

from inferplane.calibrate.methods.gptq import BLOCK, Hessian, gptq
from inferplane.calibrate.methods.rounding import BY_MINIMUM, Grid, make_grid
from inferplane.types import QTensor

DAMPING = 0.03
"""Share of the mean diagonal that is added to it: of 0.01 and 0.03 the one that lost less on other texts."""
FIRST, ROUNDS = 3, 3
"""Sweeps over the columns at first, and how often scales and then columns are chosen again."""
SWEEPS = 2
"""Sweeps over the columns after scales were chosen."""


def quantease(weight: torch.Tensor, hessian: Hessian, format: str) -> QTensor:
    """Round a weight by GPTQ, then lower the error of its products with the inputs until it hardly falls.

    Every step takes, for each row, the best entry of one column or the best scale of one group while the others stay.
    Scales of integers are chosen anew; those of FP8 and FP4 stay as GPTQ has them.

    Args:
        weight: `[N, K]` float32.
        hessian: of its inputs.
        format: a name of `FORMATS`.
    """
    begun = gptq(weight, hessian, format)
    if format in BY_MINIMUM or begun.damping is None:
        return begun.weight
    grid = make_grid(format, (weight.shape[0], weight.shape[1]))
    damped = hessian.total.clone()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean())
    found = _Descent(grid, weight, begun.weight, damped)
    found.choose_entries(FIRST)
    if not grid.dtype.is_floating_point and grid.block[0] == 1 and type(grid) is Grid:
        for _ in range(ROUNDS):
            found.choose_scales()
            found.choose_entries(SWEEPS)
    return grid.make(found.entries, found.scale)


class _Descent:
    """A weight's entries and scales while they are chosen anew.

    Attributes: `entries` `[N, K]`, `scale` `[N blocks, K blocks]`, float32.
    """

    def __init__(self, grid: Grid, weight: torch.Tensor, rounded: QTensor, hessian: torch.Tensor) -> None:
        self._grid, self._hessian = grid, hessian
        self.scale = rounded.scale.float()
        self._wide = grid.expand(self.scale).contiguous()
        self.entries = rounded.data.float()
        self._error = self.entries * self._wide - weight

    def choose_entries(self, sweeps: int) -> None:
        """Choose the entries of every column so many times."""
        columns = self.entries.shape[1]
        for first in [*range(0, columns, BLOCK)] * sweeps:
            last = min(first + BLOCK, columns)
            among = self._hessian[first:last, first:last]
            slope = self._error @ self._hessian[:, first:last]
            for i in range(last - first):
                scale, old = self._wide[:, first + i], self.entries[:, first + i]
                entry = self._grid.round(old - slope[:, i] / (among[i, i] * scale))
                change = (entry - old) * scale
                self.entries[:, first + i] = entry
                self._error[:, first + i] += change
                slope.addr_(change, among[i])

    def choose_scales(self) -> None:
        """Choose the scale of every group, one after the other. None changes its sign, or becomes 0."""
        width = self._grid.block[1]
        for group in range(self.scale.shape[1]):
            part = slice(group * width, (group + 1) * width)
            entries, old = self.entries[:, part], self.scale[:, group]
            slope = (entries * (self._error @ self._hessian[:, part])).sum(1)
            curve = ((entries @ self._hessian[part, part]) * entries).sum(1)
            new = self._grid.settle(old - slope / curve)
            new = torch.where((curve > 0) & (new * old > 0), new, old)
            self._error[:, part] += entries * (new - old)[:, None]
            self.scale[:, group] = new
        self._wide = self._grid.expand(self.scale).contiguous()
