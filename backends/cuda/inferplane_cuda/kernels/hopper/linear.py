"""Linear layers with FP8 blocks on Hopper: many rows by `gemm`, few by the portable kernel, which splits K."""

from __future__ import annotations

from typing import Any

import torch
import triton

from inferplane.kernels.triton.linear import fp8_rows
from inferplane.kernels.triton.matmul import Activations
from inferplane.kernels.triton.matmul import product as portable
from inferplane_cuda.kernels.hopper import gemm
from inferplane_cuda.kernels.hopper.mla_launch import box, programs

FEW_ROWS = 64
"""Up to so many, a tile of 128 rows would be half empty or worse, and the weight's bytes decide."""
RASTER = 8
STAGES = 5


def columns_of(rows: int, outputs: int, at_once: int) -> int:
    """Columns of a tile: those with which the last round of programs is fuller; 128 for equal ones."""

    def filled(columns: int) -> float:
        tiles = triton.cdiv(rows, 128) * triton.cdiv(outputs, columns)
        return tiles / (triton.cdiv(tiles, at_once) * at_once)

    return 128 if filled(128) >= 0.8 * filled(64) else 64  # narrower tiles load more bytes a product


def blocks(x: Activations, weight: Any, prepared: Any) -> torch.Tensor:
    """`x weight^T` in bfloat16 of activations with a scale for 128 columns, and a weight with one for 128 x 128."""
    rows, depth = x.data.shape
    if rows <= FEW_ROWS or weight.rows != 128:
        return portable(x, weight, prepared)
    outputs = weight.outputs
    columns = columns_of(rows, outputs, programs(x.data.device))
    out = torch.empty(rows, outputs, device=x.data.device, dtype=torch.bfloat16)
    fp8 = torch.float8_e4m3fn
    gemm.product[(triton.cdiv(rows, 128) * triton.cdiv(outputs, columns),)](
        box(x.data.view(fp8), 128, 128, 8), box(weight.data.view(fp8), columns, 128, 8), x.scale, weight.scale, out,
        rows, outputs, triton.cdiv(depth, 128), COLUMNS=columns, RASTER=RASTER, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return out


def linear(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Activations are coded first, with a scale for 128 columns."""
    y = blocks(fp8_rows(x, 128), p.weight, p.prepared)
    return y if p.bias is None else y + p.bias
