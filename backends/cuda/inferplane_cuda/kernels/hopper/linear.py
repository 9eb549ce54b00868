"""Linear layers with FP8 blocks on Hopper: many rows by `gemm`, few by the portable kernel, which splits K."""

from __future__ import annotations

from typing import Any

import torch
import triton

from inferplane.kernels.triton.linear import quantize_rows_to_fp8
from inferplane.kernels.triton.matmul import matmul as portable
from inferplane.kernels.triton.matmul_input import MatmulInput
from inferplane_cuda.kernels.hopper import gemm
from inferplane_cuda.kernels.hopper.mla_launch import count_programs, tma_descriptor

MAX_PORTABLE_ROWS = 64
"""Up to this many rows, a tile of 128 would be at most half full, and reading the weight decides the time."""
RASTER = 8
STAGES = 5


def choose_columns(rows: int, outputs: int, at_once: int) -> int:
    """Columns of a tile, 128 or 64: those with which the last wave of programs fills the device better."""

    def filled(columns: int) -> float:
        tiles = triton.cdiv(rows, 128) * triton.cdiv(outputs, columns)
        return tiles / (triton.cdiv(tiles, at_once) * at_once)

    return 128 if filled(128) >= 0.8 * filled(64) else 64  # narrower tiles load more bytes a product


def matmul_fp8_blocks(x: MatmulInput, weight: Any, prepared: Any) -> torch.Tensor:
    """`x weight^T` in bfloat16: activations with a scale per 128 columns, a weight with a scale per 128 x 128."""
    rows, depth = x.data.shape
    if rows <= MAX_PORTABLE_ROWS or weight.rows != 128:
        return portable(x, weight, prepared)
    outputs = weight.outputs
    columns = choose_columns(rows, outputs, count_programs(x.data.device))
    out = torch.empty(rows, outputs, device=x.data.device, dtype=torch.bfloat16)
    fp8 = torch.float8_e4m3fn
    gemm.product[(triton.cdiv(rows, 128) * triton.cdiv(outputs, columns),)](
        tma_descriptor(x.data.view(fp8), 128, 128, 8),
        tma_descriptor(weight.data.view(fp8), columns, 128, 8), x.scale, weight.scale, out,
        rows, outputs, triton.cdiv(depth, 128), COLUMNS=columns, RASTER=RASTER, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return out


def linear(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `linear` with FP8 blocks; activations are quantized first, with a scale per 128 columns."""
    y = matmul_fp8_blocks(quantize_rows_to_fp8(x, 128), view.weight, view.prepared)
    return y if view.bias is None else y + view.bias
