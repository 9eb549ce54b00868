"""Rounds matrices to a weight format: to nearest, with the range of each block that has the smallest error."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.ops.formats import (
    FORMATS,
    MXFP4_VALUES,
    dequantize_rows,
    find_mxfp4_scales,
    find_nvfp4_factor,
    find_nvfp4_scales,
    limit,
    round_to_e2m1,
)
from inferplane.ops.quantize import Quantize
from inferplane.quant.online import find_signed_scales, max_magnitude, quantize
from inferplane.types import ActivationQuant, QTensor
from inferplane.types.qtensor import round_entries, scale_shape, scales

LEAST_SHARE = 0.5
"""Smallest share of a block's largest magnitude that is tried as its range."""
STEPS = 24
"""Ranges that are tried, besides the whole one."""
BY_MINIMUM = ("mxfp8", "int4_min32", "int8_min16")
"""Formats that are rounded to nearest alone: no grid of theirs is searched."""


class Grid:
    """Blocks of a matrix that share a scale.

    Args:
        format: a name of `FORMATS`.
        shape: `[N, K]` of the matrix.
    """

    def __init__(self, format: str, shape: tuple[int, int]) -> None:
        self.dtype, self.bits, (rows, columns) = FORMATS[format]
        self.shape, self.block = shape, (rows, columns or shape[1])
        self.top = limit(self.dtype, self.bits)
        self.num_blocks = scale_shape(shape, self.block)

    @property
    def shares(self) -> Sequence[float]:
        """Shares of each block's largest magnitude that are tried as its range, besides the whole."""
        return [1 - (1 - LEAST_SHARE) * step / STEPS for step in range(1, STEPS + 1)]

    @property
    def lowest(self) -> float:
        """Smallest entry: integers of 4 bits have one more below zero, as checkpoints store them."""
        return -self.top - 1 if self.bits == 4 else -self.top

    def tile(self, matrix: torch.Tensor) -> torch.Tensor:
        """`[N, K]` as `[N blocks, rows, K blocks, columns]`, filled up with zeros."""
        (n, k), (rows, columns) = self.shape, self.block
        pad = (0, self.num_blocks[1] * columns - k, 0, self.num_blocks[0] * rows - n)
        padded = torch.nn.functional.pad(matrix, pad) if any(pad) else matrix
        return padded.unflatten(1, (self.num_blocks[1], columns)).unflatten(0, (self.num_blocks[0], rows))

    def find_scales(self, matrix: torch.Tensor, share: float = 1.0) -> torch.Tensor:
        """Scales `[N blocks, K blocks]` for this share of each block's largest magnitude, as they will be stored; in 4
        bits they have the sign that `quantize` gives them."""
        tiles = self.tile(matrix)
        if self.bits == 4:
            return self.settle(find_signed_scales(tiles.transpose(1, 2).flatten(2)) * share)
        return self.settle(scales(tiles.abs().amax((1, 3)) * share, self.top))

    def settle(self, scale: torch.Tensor) -> torch.Tensor:
        """Scales as they are stored: those of integers in float16 if they fit (`inferplane.quant.online`)."""
        if self.dtype.is_floating_point:
            return scale
        half = scale.half().float()
        return torch.where((half != 0) & half.isfinite(), half, scale)

    def expand(self, scale: torch.Tensor) -> torch.Tensor:
        """A scale for each entry, `[N, K]`."""
        wide = scale.repeat_interleave(self.block[0], 0)[: self.shape[0]]
        return wide.repeat_interleave(self.block[1], 1)[:, : self.shape[1]]

    def round(self, scaled: torch.Tensor) -> torch.Tensor:
        """Entries of the format in float32, nearest to numbers that are divided by their scales already."""
        if self.dtype.is_floating_point:
            return round_entries(scaled, self.dtype, self.top).float()
        return scaled.round().clamp(self.lowest, self.top)

    def make(self, entries: torch.Tensor, scale: torch.Tensor) -> QTensor:
        """The quantized matrix of these entries."""
        return QTensor(entries.to(self.dtype), scale, block=self.block, bits=self.bits)


class E2m1Grid(Grid):
    """Blocks of a matrix in MXFP4 or NVFP4. Entries are canonical ones, twice the values."""

    def __init__(self, format: str, shape: tuple[int, int]) -> None:
        super().__init__(format, shape)
        self.top, self._takes_powers = float(MXFP4_VALUES[-1]), format == "mxfp4"

    @property
    def shares(self) -> Sequence[float]:
        """Of MXFP4 the powers of two beside the usual one: without saturation, and with more of it."""
        return (2.0, 0.5) if self._takes_powers else super().shares

    def find_scales(self, matrix: torch.Tensor, share: float = 1.0) -> torch.Tensor:
        """As `Grid.find_scales`."""
        amax = self.tile(matrix).abs().amax((1, 3)) * share
        if self._takes_powers:
            return find_mxfp4_scales(amax)
        return find_nvfp4_scales(amax, find_nvfp4_factor(max_magnitude(matrix)))

    def round(self, scaled: torch.Tensor) -> torch.Tensor:
        """As `Grid.round`."""
        return round_to_e2m1(scaled)


def make_grid(format: str, shape: tuple[int, int]) -> Grid:
    """The grid of a format of which scales are searched.

    Args:
        format: a name of `FORMATS`, none of `BY_MINIMUM`. shape: `[N, K]` of the matrix.
    """
    return (E2m1Grid if format in ("mxfp4", "nvfp4") else Grid)(format, shape)


def round_to_nearest(weight: torch.Tensor, format: str) -> QTensor:
    """Round to nearest, with scales of the largest magnitudes.

    Args:
        weight: `[N, K]`. format: a name of `FORMATS`.
    """
    return quantize(weight, format)


def search_clip(weight: torch.Tensor, format: str, importance: torch.Tensor | None = None) -> QTensor:
    """Round to nearest with the range of each block that has the smallest error, which is at most that of the whole.

    Args:
        weight: `[N, K]`. format: a name of `FORMATS`.
        importance: `[K]`, weights of the squared errors of columns; None: all are alike.
    """
    if format in BY_MINIMUM:
        return round_to_nearest(weight, format)
    grid = make_grid(format, (weight.shape[0], weight.shape[1]))
    return grid.make(*_round_with(grid, weight, search_scales(grid, weight, importance)))


def search_scales(grid: Grid, weight: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """The scales of `search_clip`, `[N blocks, K blocks]`."""
    best = grid.find_scales(weight)
    least = _block_errors(grid, weight, best, importance)
    for share in grid.shares:
        scale = grid.find_scales(weight, share)
        error = _block_errors(grid, weight, scale, importance)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def _round_with(grid: Grid, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return grid.round(weight / grid.expand(scale)), scale


def _block_errors(
    grid: Grid, weight: torch.Tensor, scale: torch.Tensor, importance: torch.Tensor | None
) -> torch.Tensor:
    wide = grid.expand(scale)
    wrong = (grid.round(weight / wide) * wide - weight).square()
    if importance is not None:
        wrong = wrong * importance
    return grid.tile(wrong).sum((1, 3))


def fake_quantize(x: torch.Tensor, quant: ActivationQuant | None) -> torch.Tensor:
    """The values of activations `[T, K]` after they are quantized."""
    if quant is None:
        return x
    return dequantize_rows(*Quantize(quant.format, quant.group)(x), quant.group)
