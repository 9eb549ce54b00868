"""Quantizing: of activations while running (the op), and of weights (the canonical encoders of each format)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.errors import UsageError
from inferplane.ops.draw import Draw
from inferplane.ops.op import Comparison, Cost, Op, Sample, Workload, relative_error
from inferplane.types import QTensor
from inferplane.types.qtensor import scale_shape

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

FORMATS: dict[str, tuple[torch.dtype, int, tuple[int, int]]] = {
    "fp8_block": (FP8, 8, (128, 128)),
    "fp8_row": (FP8, 8, (1, 0)),
    "int8_row": (torch.int8, 8, (1, 0)),
    "int8_group": (torch.int8, 8, (1, 128)),
    "int4_group": (torch.int8, 4, (1, 128)),
    "int4_group64": (torch.int8, 4, (1, 64)),
    "int4_group32": (torch.int8, 4, (1, 32)),
    "int4_row": (torch.int8, 4, (1, 0)),
}
"""Weight formats: dtype of the data, significant bits, rows and columns a scale (0 columns: the whole row)."""


def limit(dtype: torch.dtype, bits: int) -> float:
    """Largest magnitude that a format uses: 448 for FP8 e4m3, 127 for int8, 7 for int4."""
    return FP8_MAX if dtype is FP8 else float(2 ** (bits - 1) - 1)


def scales(amax: torch.Tensor, top: float) -> torch.Tensor:
    """`amax / top`, and 1 where that is 0: for zeros, and for numbers too small to be divided."""
    scale = amax / top
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def encode(weight: torch.Tensor, format: str) -> QTensor:
    """Quantize a plain weight by rounding to nearest, with scales `amax / limit` a block.

    Args:
        weight: `[..., N, K]`.
        format: one of `FORMATS`.

    Returns:
        A symmetric QTensor. A block of zeros gets scale 1, so that nothing is divided by zero.

    Raises:
        UsageError: unknown format.

    Source: block scales as in the DeepSeek-V3 report, section 3.3.2 (128 x 128 blocks, e4m3); rows and groups as in
    usual weight-only schemes.
    """
    if format not in FORMATS:
        raise UsageError(f"Unknown weight format {format!r}.", there_is=", ".join(sorted(FORMATS)))
    dtype, bits, (rows, columns) = FORMATS[format]
    block = (rows, columns or weight.shape[-1])
    w = weight.float()
    counts = scale_shape(tuple(w.shape), block)
    pad = (0, counts[-1] * block[1] - w.shape[-1], 0, counts[-2] * block[0] - w.shape[-2])
    tiles = torch.nn.functional.pad(w, pad).unflatten(-1, (counts[-1], block[1])).unflatten(-3, (counts[-2], block[0]))
    amax = tiles.abs().amax((-3, -1))
    top = limit(dtype, bits)
    scale = scales(amax, top)
    scaled = w / QTensor(torch.empty_like(w), scale, block=block).expanded_scale()
    data = scaled.clamp(-top, top).to(FP8) if dtype is FP8 else scaled.round().clamp(-top, top).to(torch.int8)
    return QTensor(data, scale, block=block, bits=bits)


class Quantize(Op, name="quantize"):
    """Quantize activations while running: `scale = amax / limit` a token and group, `data = round(x / scale)`.

    Args of the call:
        x: `[T, K]` in the plan's dtype.

    Returns:
        data `[T, K]` (float8_e4m3fn or int8) and scale float32 `[T, ceil(K / group)]`. A group of zeros gets scale 1.

    Fields: `format` "fp8" or "int8"; `group` columns a scale, 0 for the whole row.

    Source: DeepSeek-V3 report, section 3.3.2 (1 x 128 groups); per-token int8 as in SmoothQuant (arXiv 2211.10438).
    """

    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}

    format: str = "fp8"
    group: int = 128

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        name = "fp8_row" if self.format == "fp8" else "int8_row"
        dtype, bits, _ = FORMATS[name]
        group = self.group or x.shape[-1]
        h = x.float()
        counts = scale_shape(tuple(h.shape), (1, group))
        tiles = torch.nn.functional.pad(h, (0, counts[-1] * group - h.shape[-1])).unflatten(-1, (counts[-1], group))
        amax, top = tiles.abs().amax(-1), limit(dtype, bits)
        scale = scales(amax, top)
        scaled = h / scale.repeat_interleave(group, -1)[..., : h.shape[-1]]
        data = scaled.clamp(-top, top)
        return (data.to(FP8) if dtype is FP8 else data.round().to(torch.int8)), scale

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """Scales by relative error; data by the share of entries further than one step of the format away."""
        (data, scale), (data0, scale0) = got, want
        error = relative_error(scale, scale0)
        if tuple(data.shape) != tuple(data0.shape) or data.dtype != data0.dtype:
            return Comparison(float("inf"), f"data is {tuple(data.shape)} {data.dtype}")
        step = (data0.float().abs() / 8 + 2**-9) if data0.dtype is FP8 else torch.ones_like(data0, dtype=torch.float32)
        far = ((data.float() - data0.float()).abs() > step * 1.001).float().mean().item()
        return Comparison(max(error, far), "share of data more than one step away" if far > error else "scale")

    def cost(self, load: Workload) -> Cost:
        """Not counted: it is fused into its neighbours wherever speed matters."""
        return Cost()

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Groups that divide the row and that do not; a row of zeros among others."""

        def rows(t: int, k: int) -> Any:
            def inputs(draw: Draw) -> tuple[torch.Tensor]:
                x = draw.normal(t, k, scale=3.0)
                x[0] = 0
                return (x,)

            return inputs

        return [
            Sample("fp8_group128", Quantize("fp8", 128), rows(3, 256)),
            Sample("fp8_ragged", Quantize("fp8", 128), rows(5, 192)),
            Sample("int8_row", Quantize("int8", 0), rows(7, 320)),
        ]


def dequantize_rows(data: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """Undo `Quantize`: float32 `[T, K]` from data `[T, K]` and scale `[T, groups]`; `group` 0 is the whole row.

    Raises:
        UsageError: `scale` has another number of groups.
    """
    want = scale_shape(tuple(data.shape), (1, group or data.shape[-1]))
    if tuple(scale.shape) != want:
        raise UsageError(
            f"Scales of shape {tuple(scale.shape)} for groups of {group or 'all'} columns, which want {want}."
        )
    wide = scale.repeat_interleave(group or data.shape[-1], -1)[..., : data.shape[-1]]
    return data.float() * wide
