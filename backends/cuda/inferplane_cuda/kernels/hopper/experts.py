"""Experts with FP8 blocks on Hopper: many rows per expert by `grouped`, few by the portable kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton

from inferplane.kernels.triton.activations import activation_mul_quantize
from inferplane.kernels.triton.experts.blocks import assign_blocks
from inferplane.kernels.triton.experts.moe import moe_experts_fp8 as portable
from inferplane.kernels.triton.experts.moe import sum_pairs
from inferplane.kernels.triton.linear import FP8_GROUP, quantize_rows_to_fp8
from inferplane.kernels.triton.matmul_input import MatmulInput, make_quantized_input
from inferplane.kernels.triton.weight_packing import PackedWeight
from inferplane_cuda.kernels.hopper import grouped
from inferplane_cuda.kernels.hopper.linear import MAX_PORTABLE_ROWS, RASTER, STAGES
from inferplane_cuda.kernels.hopper.mla_launch import tma_descriptor

ROWS = 128
COLUMNS = 128
FP8 = torch.float8_e4m3fn
Assignment = tuple[torch.Tensor, torch.Tensor]


def gather_pairs(x: MatmulInput, assignment: Assignment, top_k: int, pairs: int) -> MatmulInput:
    """Copy quantized rows of tokens to the slots of their pairs, `top_k` per token."""
    slots, owners = assignment
    assert x.scale is not None
    depth, groups = x.data.shape[1], x.scale.shape[1]
    data = torch.empty(len(slots), depth, device=slots.device, dtype=torch.uint8)
    scale = torch.empty(len(slots), groups, device=slots.device)
    grouped.gather_pairs[(len(slots),)](
        x.data, x.scale, slots, owners, data, scale, pairs,
        K=depth, GROUPS=groups, TOP_K=top_k, BLOCK=2048, BLOCK_G=triton.next_power_of_2(groups), num_warps=4,
    )  # fmt: skip
    return make_quantized_input(data, scale, x.group, x.dtype)


def multiply_grouped(
    x: MatmulInput, weight: PackedWeight, assignment: Assignment, pairs: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Each block's 128 rows times its expert's matrix.

    Args:
        x: rows of slots, with a scale per 128 columns.
        weight: `[E, N, K]`, with a scale per 128 x 128.
        assignment: slots and owners in blocks of 128 rows, contiguous (`assign_blocks`) or masked (`masked`).
        pairs: how many there are; slots that hold this number are empty.
        weights: float32 `[pairs]`; results are multiplied and lie by pairs, float32.

    Returns:
        bfloat16 `[slots, N]`, whose empty slots mean nothing; or float32 `[pairs, N]`.
    """
    (slots, owners), (_, outputs, depth) = assignment, weight.data.shape
    weighted = weights is not None
    out = torch.empty(
        pairs if weighted else len(slots), outputs, device=slots.device,
        dtype=torch.float32 if weighted else torch.bfloat16,
    )  # fmt: skip
    assert weight.scale is not None
    grouped.product[(len(owners) * triton.cdiv(outputs, COLUMNS),)](
        tma_descriptor(x.data.view(FP8), ROWS, 128, 8),
        tma_descriptor(weight.data.view(FP8).flatten(0, 1), COLUMNS, 128, 8), x.scale,
        weight.scale, out, slots, owners, x.scale if weights is None else weights, len(owners), pairs, outputs,
        triton.cdiv(depth, 128), weight.scale.stride(0),
        COLUMNS=COLUMNS, RASTER=RASTER, STAGES=STAGES, WEIGHTED=weighted, num_warps=4,
    )  # fmt: skip
    return out


def moe_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The op `moe_experts` with activations in FP8 before both products; one kernel lies between these."""
    pairs, count = ids.numel(), view.gate_up.data.shape[0]
    if pairs <= MAX_PORTABLE_ROWS * count or not view.gate_up.rows == view.down.rows == 128:
        return portable(view, x, weights, ids)
    ids = ids.contiguous()
    assignment = assign_blocks(ids, count, ROWS)
    rows = gather_pairs(quantize_rows_to_fp8(x, FP8_GROUP), assignment, ids.shape[1], pairs)
    values, scales = activation_mul_quantize(multiply_grouped(rows, view.gate_up, assignment, pairs), "fp8", FP8_GROUP)
    inner = make_quantized_input(values, scales, FP8_GROUP, x.dtype)
    return sum_pairs(multiply_grouped(inner, view.down, assignment, pairs, weights.contiguous()), ids, x.dtype)
