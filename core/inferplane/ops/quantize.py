"""Quantizing activations while running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.draw import Draw
from inferplane.ops.formats import FORMATS, FP8, limit, round_to_e2m1
from inferplane.ops.op import Comparison, Op, Sample, relative_error
from inferplane.types.qtensor import round_entries, scale_shape, scales

INT4_LIMIT = 7.5


def find_e2m1_scales(amax: torch.Tensor) -> torch.Tensor:
    """Scales of integers that are twice the values of e2m1: powers of two of at least 2^-126.

    Args:
        amax: the largest magnitudes of groups, float32. Divided by two scales they are 3.5 to 7.

    Returns:
        float32 of the same shape; 1 for a group of zeros, NaN for one that is not finite.
    """
    rounded_up = amax.contiguous().view(torch.int32) + (1 << 21)  # from 1.75 times a power on, the next power
    scale = torch.ldexp(torch.ones_like(amax), ((rounded_up >> 23) - 3).clamp(1, 254) - 127)
    return scale.masked_fill(amax == 0, 1.0).masked_fill(~amax.isfinite(), torch.nan)


class Quantize(Op, name="quantize"):
    """Quantize activations while running: `scale = amax / limit` per token and group, `data = round(x / scale)`.

    The limit is 448 for "fp8", 127 for "int8", and 7.5 for "int4", whose integers are -8 to 7. "mxfp4" is the format of
    weights of this name: integers that are twice the values of e2m1, and half of a power of two per group, of which the
    largest magnitude is 3.5 to 7 times one.

    Its cost is not counted: it is fused into neighbouring ops wherever speed matters.

    Args of the call:
        x: `[T, K]` in the plan's dtype.

    Returns:
        data `[T, K]` (float8_e4m3fn or int8) and scale float32 `[T, ceil(K / group)]`. A group of zeros gets scale 1.

    Fields: `format` "fp8", "int8", "int4" or "mxfp4"; `group` columns per scale, 0 for the whole row; 32 of "mxfp4".

    Source: DeepSeek-V3 report, section 3.3.2 (1 x 128 groups); per-token int8 as in SmoothQuant (arXiv 2211.10438);
    int4 as compressed-tensors scales symmetric integers, to half of their 15 steps; OCP Microscaling Formats (MX)
    Specification 1.0, with the powers that compressed-tensors takes (`round_to_power_2`).
    """

    compares_entries = False
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
        amax, top = tiles.abs().amax(-1), INT4_LIMIT if self.format == "int4" else limit(dtype, bits)
        scale = find_e2m1_scales(amax) if self.format == "mxfp4" else scales(amax, top)
        scaled = h / scale.repeat_interleave(group, -1)[..., : h.shape[-1]]
        if self.format == "mxfp4":
            return round_to_e2m1(scaled).to(dtype), scale
        if self.format == "int4":
            return scaled.round().nan_to_num(0.0).clamp(-8, 7).to(dtype), scale
        return round_entries(scaled, dtype, top), scale

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """Scales by relative error; data by the share of entries that differ by more than one step of the format."""
        (data, scale), (data0, scale0) = got, want
        error = relative_error(scale, scale0)
        if tuple(data.shape) != tuple(data0.shape) or data.dtype != data0.dtype:
            return Comparison(float("inf"), f"data is {tuple(data.shape)} {data.dtype}")
        step = (data0.float().abs() / 8 + 2**-9) if data0.dtype is FP8 else torch.ones_like(data0, dtype=torch.float32)
        far = ((data.float() - data0.float()).abs() > step * 1.001).float().mean().item()
        return Comparison(max(error, far), "share of data more than one step away" if far > error else "scale")

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
            Sample("int4_row", Quantize("int4", 0), rows(7, 320)),
            Sample("mxfp4", Quantize("mxfp4", 32), rows(5, 192)),
        ]
