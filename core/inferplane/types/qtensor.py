"""QTensor: the canonical form of a quantized weight. Checkpoint formats load to it; kernels pack from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from inferplane.errors import UsageError
from inferplane.renamed import old_attributes


@old_attributes({"expanded_scale": "expand_scale"})
@dataclass(frozen=True)
class QTensor:
    """Integers or FP8 numbers with scales (and zero points or minimums) per block: `value = (data - zero) * scale +
    minimum`.

    Rows are outputs, as in `torch.nn.functional.linear`. A dimension of experts may precede them.

    Args:
        data: `[..., N, K]`, int8 (int4 values take one byte each, -8..7, or 0..15 with minimums) or float8_e4m3fn.
        scale: float32 `[..., ceil(N / block[0]), ceil(K / block[1])]`.
        zero: zero points, shaped as `scale`, or None for symmetric formats.
        block: rows and columns that share a scale: `(1, K)` per row, `(1, 128)` per group, `(128, 128)` FP8 blocks.
        bits: significant bits per entry of `data` (8 or 4).
        act_scale: float32 `[1]`, the calibrated scale of the activations that are multiplied by the weight; None: not
            calibrated. It does not change the values; a kernel that quantizes activations may use it.
        minimum: float32, shaped as `scale`, added to every value of its block; None: nothing is added.

    Raises:
        UsageError: the shape of `scale` does not fit `data` and `block`, or a block is empty.
    """

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    block: tuple[int, int] = (1, 128)
    bits: int = 8
    act_scale: torch.Tensor | None = None
    minimum: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if min(self.block) < 1:
            raise UsageError(
                f"QTensor: blocks of {self.block}.", remedy="state at least one row and one column per block"
            )
        want = scale_shape(tuple(self.data.shape), self.block)
        for name, t in (("scale", self.scale), ("zero", self.zero), ("minimum", self.minimum)):
            if t is not None and tuple(t.shape) != want:
                raise UsageError(
                    f"QTensor: {name} has shape {tuple(t.shape)}, data {tuple(self.data.shape)} with blocks of "
                    f"{self.block} needs {want}.",
                    remedy="pass one scale per block; the last blocks of a row or column may be partial",
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape `[..., N, K]`."""
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data, scales, zero points and minimums in this form (one byte per int4 entry)."""
        parts = (self.data, self.scale, self.zero, self.minimum)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    def expand_scale(self) -> torch.Tensor:
        """One scale per entry, float32 `[..., N, K]`."""
        return _expand(self.scale, self.block, self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The plain tensor `[..., N, K]` in `dtype`; computed in float32 and rounded once.

        Experts are expanded one by one: in float32, all at once would take four times the memory of the result.
        """
        if self.data.ndim > 2:
            out = torch.empty(self.shape, dtype=dtype, device=self.data.device)
            for i in range(self.shape[0]):
                out[i] = self.of_expert(i).dequantize(dtype)
            return out
        value = self.data.float()
        if self.zero is not None:
            value = value - _expand(self.zero.float(), self.block, self.shape)
        value = value * self.expand_scale()
        if self.minimum is not None:
            value = value + _expand(self.minimum, self.block, self.shape)
        return value.to(dtype)

    def of_expert(self, expert: int) -> QTensor:
        """One slice `[N, K]` of a stack `[E, N, K]`."""
        return self._with(itemgetter(expert), itemgetter(expert))

    def refine(self, rows: int) -> QTensor:
        """The same values with scales for blocks of `rows` rows; `rows` must divide the current rows per block."""
        have = self.block[0]
        if rows == have:
            return self
        if have % rows:
            raise UsageError(f"QTensor: blocks of {have} rows cannot be refined to {rows}, which is no divisor of it.")
        n = math.ceil(self.shape[-2] / rows)

        def grow(t: torch.Tensor) -> torch.Tensor:
            return t.repeat_interleave(have // rows, -2)[..., :n, :].contiguous()

        return self._with(lambda t: t, grow, block=(rows, self.block[1]))

    @staticmethod
    def cat(parts: list[QTensor]) -> QTensor:
        """Stack along rows (dim -2), e.g. q, k and v of one projection.

        Parts whose rows do not fill whole blocks are refined first, so that no block crosses two parts. The largest of
        their activation scales applies to all: they share their activations, and the largest scale avoids saturation.

        Raises:
            UsageError: there are no parts, or they differ in dtype, columns, column blocks, bits or
                the presence of zero points or minimums.
        """
        if len({p._form for p in parts}) != 1:
            raise UsageError(
                f"QTensor.cat: {len(parts)} parts that differ in dtype, columns, column blocks, bits, zero points or "
                "minimums.",
                remedy="quantize all parts of a fused weight alike",
            )
        first = parts[0]
        rows = math.gcd(*(p.block[0] for p in parts))
        for p in parts[:-1]:
            rows = math.gcd(rows, p.shape[-2])
        fine = [p.refine(rows) for p in parts]
        zero = None if first.zero is None else torch.cat([p.zero for p in fine if p.zero is not None], -2)
        minimums = [p.minimum for p in fine if p.minimum is not None]
        return QTensor(
            torch.cat([p.data for p in fine], -2),
            torch.cat([p.scale for p in fine], -2),
            zero,
            (rows, first.block[1]),
            first.bits,
            largest([p.act_scale for p in parts]),
            torch.cat(minimums, -2) if minimums else None,
        )

    @property
    def _form(self) -> tuple[Any, ...]:
        """What parts of one weight have in common."""
        lacks = self.zero is None, self.minimum is None
        return (self.data.dtype, self.shape[:-2], self.shape[-1], self.block[1], self.bits, *lacks)

    def shard(self, axis: int, start: int, stop: int) -> QTensor:
        """Rows (axis 0) or columns (axis 1) `start:stop`.

        Raises:
            UsageError: a column bound falls inside a block (rows are refined instead).
        """
        if axis == 0:
            fine = self.refine(math.gcd(self.block[0], start)) if start else self
            b = fine.block[0]
            blocks = slice(start // b, math.ceil(stop / b))
            return fine._with(lambda t: _own(t[..., start:stop, :]), lambda t: _own(t[..., blocks, :]))
        b = self.block[1]
        one_block = b >= self.shape[-1]
        if not one_block and (start % b or (stop % b and stop != self.shape[-1])):
            raise UsageError(
                f"QTensor.shard: columns {start}:{stop} divide a block of {b} columns.",
                remedy=f"choose a tensor-parallel size whose share is a multiple of {b} columns",
            )
        blocks = slice(0, None) if one_block else slice(start // b, math.ceil(stop / b))
        block = (self.block[0], stop - start) if one_block else self.block
        return self._with(lambda t: _own(t[..., start:stop]), lambda t: _own(t[..., blocks]), block=block)

    def to(self, device: torch.device | str) -> QTensor:
        """A copy of every part on `device`."""
        act = None if self.act_scale is None else self.act_scale.to(device)
        return self._with(lambda t: t.to(device), lambda t: t.to(device), act_scale=act)

    def _with(
        self,
        of_data: Callable[[torch.Tensor], torch.Tensor],
        of_scale: Callable[[torch.Tensor], torch.Tensor],
        **changes: Any,
    ) -> QTensor:
        """A copy with `of_data` applied to the entries, `of_scale` to scales, zero points and minimums, and other
        changes."""
        zero = None if self.zero is None else of_scale(self.zero)
        minimum = None if self.minimum is None else of_scale(self.minimum)
        of = {"data": of_data(self.data), "scale": of_scale(self.scale), "zero": zero, "minimum": minimum}
        return replace(self, **{**of, **changes})


def largest(scales: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The activation scale `[1]` of fused or stacked weights: the largest of theirs; None if one weight has none."""
    known = [s for s in scales if s is not None]
    return torch.stack(known).amax(0) if len(known) == len(scales) else None


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a tensor `[..., N, K]` with blocks of `block` rows and columns."""
    return (*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1]))


def scales(amax: torch.Tensor, top: float, power_of_two: bool = False) -> torch.Tensor:
    """`amax / top`, or 1 where that is 0: for zeros, and for numbers too small to be divided. NaN and infinity remain,
    so that no entry of their group is read as a number.

    Args:
        amax: float32, largest magnitudes of groups.
        top: largest magnitude of the format.
        power_of_two: round up to powers of two.
    """
    scale = amax / top
    if power_of_two:
        rounded = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isfinite(), rounded, scale)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def round_entries(scaled: torch.Tensor, dtype: torch.dtype, top: float) -> torch.Tensor:
    """Scaled entries in the format's dtype, rounded to nearest even. A scale with few significant bits, which numbers
    below 1e-41 have, may leave entries beyond `top`: they saturate. NaN remains in FP8, and is 0 in int8, whose scale
    then is NaN.
    """
    limited = scaled.clamp(-top, top)
    return limited.round().nan_to_num(0.0).to(dtype) if dtype is torch.int8 else limited.to(dtype)


def _own(part: torch.Tensor) -> torch.Tensor:
    """A copy with its own memory; a view would keep the memory of the entire tensor."""
    return part.clone(memory_format=torch.contiguous_format)


def _expand(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    wide = scale.float()
    if block[0] > 1:
        wide = wide.repeat_interleave(block[0], -2)
    if block[1] > 1:
        wide = wide.repeat_interleave(block[1], -1)
    return wide[..., : shape[-2], : shape[-1]]
