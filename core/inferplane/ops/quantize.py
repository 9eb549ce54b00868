"""Quantizing activations while running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.draw import Draw
from inferplane.ops.formats import FORMATS, FP8, limit
from inferplane.ops.op import Comparison, Op, Sample, relative_error
from inferplane.types.qtensor import round_entries, scale_shape, scales


class Quantize(Op, name="quantize"):
    """Quantize activations while running: `scale = amax / limit` per token and group, `data = round(x / scale)`.

    Its cost is not counted: it is fused into neighbouring ops wherever speed matters.

    Args of the call:
        x: `[T, K]` in the plan's dtype.

    Returns:
        data `[T, K]` (float8_e4m3fn or int8) and scale float32 `[T, ceil(K / group)]`. A group of zeros gets scale 1.

    Fields: `format` "fp8" or "int8"; `group` columns per scale, 0 for the whole row.

    Source: DeepSeek-V3 report, section 3.3.2 (1 x 128 groups); per-token int8 as in SmoothQuant (arXiv 2211.10438).
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
        amax, top = tiles.abs().amax(-1), limit(dtype, bits)
        scale = scales(amax, top)
        scaled = h / scale.repeat_interleave(group, -1)[..., : h.shape[-1]]
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
        ]
