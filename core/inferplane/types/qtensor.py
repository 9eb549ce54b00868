"""QTensor: the canonical form of a quantized weight. Checkpoint formats load to it; kernels pack from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from inferplane.errors import UsageError


@dataclass(frozen=True)
class QTensor:
    """Integers or FP8 numbers with scales (and zero points) a block: `value = (data - zero) * scale`.

    Rows are outputs, as in `torch.nn.functional.linear`. A leading dimension of experts may stand before them.

    Args:
        data: `[..., N, K]`, int8 (int4 values are kept one a byte, -8..7) or float8_e4m3fn.
        scale: float32 `[..., ceil(N / block[0]), ceil(K / block[1])]`.
        zero: zero points, shaped as `scale`, or None for symmetric formats.
        block: rows and columns that share a scale: `(1, K)` per row, `(1, 128)` per group, `(128, 128)` FP8 blocks.
        bits: significant bits of an entry of `data` (8 or 4).
        act_scale: float32 `[1]`, the scale of activations that meet the weight, found by calibration; None: none was.
            It is no part of the values: a kernel that codes activations may use it.

    Raises:
        UsageError: the shape of `scale` does not fit `data` and `block`, or a block is empty.
    """

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    block: tuple[int, int] = (1, 128)
    bits: int = 8
    act_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if min(self.block) < 1:
            raise UsageError(
                f"QTensor: blocks of {self.block}.", remedy="state at least one row and one column a block"
            )
        want = scale_shape(tuple(self.data.shape), self.block)
        for name, t in (("scale", self.scale), ("zero", self.zero)):
            if t is not None and tuple(t.shape) != want:
                raise UsageError(
                    f"QTensor: {name} has shape {tuple(t.shape)}, data {tuple(self.data.shape)} with blocks of "
                    f"{self.block} wants {want}.",
                    remedy="pass one scale a block, the last blocks of a row or column may be partial",
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape `[..., N, K]`."""
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data, scales and zero points as kept here (int4 entries count a byte each)."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.zero) if t is not None)

    def expanded_scale(self) -> torch.Tensor:
        """Scales repeated to one an entry, float32 `[..., N, K]`."""
        return _expand(self.scale, self.block, self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The plain tensor `[..., N, K]` in `dtype`; computed in float32 and rounded once.

        A stack of experts is expanded one by one: in float32 all at once they would take four times their result.
        """
        if self.data.ndim > 2:
            out = torch.empty(self.shape, dtype=dtype, device=self.data.device)
            for i in range(self.shape[0]):
                zero = None if self.zero is None else self.zero[i]
                out[i] = replace(self, data=self.data[i], scale=self.scale[i], zero=zero).dequantize(dtype)
            return out
        value = self.data.float()
        if self.zero is not None:
            value = value - _expand(self.zero.float(), self.block, self.shape)
        return (value * self.expanded_scale()).to(dtype)

    def refine(self, rows: int) -> QTensor:
        """The same values with scales for blocks of `rows` rows, where `rows` divides the present block's rows."""
        have = self.block[0]
        if rows == have:
            return self
        if have % rows:
            raise UsageError(f"QTensor: blocks of {have} rows cannot be refined to {rows}, which is no divisor of it.")
        n = math.ceil(self.shape[-2] / rows)

        def grow(t: torch.Tensor) -> torch.Tensor:
            return t.repeat_interleave(have // rows, -2)[..., :n, :].contiguous()

        return replace(
            self,
            scale=grow(self.scale),
            zero=None if self.zero is None else grow(self.zero),
            block=(rows, self.block[1]),
        )

    @staticmethod
    def cat(parts: list[QTensor]) -> QTensor:
        """Stack along rows (dim -2), e.g. q, k and v of one projection.

        Parts whose rows do not fill whole blocks are first refined, so that no block crosses two parts. Of their scales
        of activations the largest holds for all: they meet the same ones, and nothing is cut off.

        Raises:
            UsageError: there are no parts, or they differ in dtype, columns, column blocks, bits or
                the presence of zero points.
        """
        if len({(p.data.dtype, p.shape[:-2], p.shape[-1], p.block[1], p.bits, p.zero is None) for p in parts}) != 1:
            raise UsageError(
                f"QTensor.cat: {len(parts)} parts that differ in dtype, columns, column blocks, bits or zero points.",
                remedy="quantize all parts of a fused weight alike",
            )
        first = parts[0]
        rows = math.gcd(*(p.block[0] for p in parts))
        for p in parts[:-1]:
            rows = math.gcd(rows, p.shape[-2])
        fine = [p.refine(rows) for p in parts]
        zero = None if first.zero is None else torch.cat([p.zero for p in fine if p.zero is not None], -2)
        return QTensor(
            torch.cat([p.data for p in fine], -2),
            torch.cat([p.scale for p in fine], -2),
            zero,
            (rows, first.block[1]),
            first.bits,
            largest([p.act_scale for p in parts]),
        )

    def shard(self, axis: int, start: int, stop: int) -> QTensor:
        """Rows (axis 0) or columns (axis 1) `start:stop`.

        Raises:
            UsageError: a column bound falls inside a block (rows are refined instead).
        """
        if axis == 0:
            fine = self.refine(math.gcd(self.block[0], start)) if start else self
            b = fine.block[0]
            cut = slice(start // b, math.ceil(stop / b))
            return replace(
                fine,
                data=_own(fine.data[..., start:stop, :]),
                scale=_own(fine.scale[..., cut, :]),
                zero=None if fine.zero is None else _own(fine.zero[..., cut, :]),
            )
        b = self.block[1]
        whole = b >= self.shape[-1]
        if not whole and (start % b or (stop % b and stop != self.shape[-1])):
            raise UsageError(
                f"QTensor.shard: columns {start}:{stop} cut a block of {b} columns.",
                remedy=f"choose a tensor-parallel size whose share is a multiple of {b} columns",
            )
        cut = slice(0, None) if whole else slice(start // b, math.ceil(stop / b))
        return replace(
            self,
            data=_own(self.data[..., start:stop]),
            scale=_own(self.scale[..., cut]),
            zero=None if self.zero is None else _own(self.zero[..., cut]),
            block=(self.block[0], stop - start) if whole else self.block,
        )

    def to(self, device: torch.device | str) -> QTensor:
        """A copy of every part on `device`."""
        zero = None if self.zero is None else self.zero.to(device)
        act = None if self.act_scale is None else self.act_scale.to(device)
        return replace(self, data=self.data.to(device), scale=self.scale.to(device), zero=zero, act_scale=act)


def largest(scales: list[torch.Tensor | None]) -> torch.Tensor | None:
    """One scale of activations `[1]` for weights that are fused or stacked: the largest; None where one has none."""
    there = [s for s in scales if s is not None]
    return torch.stack(there).amax(0) if len(there) == len(scales) else None


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a tensor `[..., N, K]` with blocks of `block` rows and columns."""
    return (*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1]))


def _own(part: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own: a view would keep the whole tensor alive."""
    return part.clone(memory_format=torch.contiguous_format)


def _expand(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    wide = scale.float()
    if block[0] > 1:
        wide = wide.repeat_interleave(block[0], -2)
    if block[1] > 1:
        wide = wide.repeat_interleave(block[1], -1)
    return wide[..., : shape[-2], : shape[-1]]
