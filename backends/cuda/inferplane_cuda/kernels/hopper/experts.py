"""Experts with FP8 blocks on Hopper: many rows an expert by `grouped`, few by the portable kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton

from inferplane.kernels.triton.linear import FP8_GROUP, fp8_rows
from inferplane.kernels.triton.matmul import Activations, coded
from inferplane.kernels.triton.moe import dealt, summed
from inferplane.kernels.triton.moe import moe_experts_fp8 as portable
from inferplane.kernels.triton.rowwise import gated as gate
from inferplane.kernels.triton.weight_packing import Packed
from inferplane_cuda.kernels.hopper import grouped
from inferplane_cuda.kernels.hopper.linear import FEW_ROWS, RASTER, STAGES
from inferplane_cuda.kernels.hopper.mla_launch import box

ROWS = 128
COLUMNS = 128
FP8 = torch.float8_e4m3fn
Dealing = tuple[torch.Tensor, torch.Tensor]


def spread(x: Activations, dealing: Dealing, top_k: int, pairs: int) -> Activations:
    """Rows of tokens as rows of slots, `top_k` of them a token."""
    slots, owners = dealing
    assert x.scale is not None
    depth, groups = x.data.shape[1], x.scale.shape[1]
    data = torch.empty(len(slots), depth, device=slots.device, dtype=torch.uint8)
    scale = torch.empty(len(slots), groups, device=slots.device)
    grouped.spread[(len(slots),)](
        x.data, x.scale, slots, owners, data, scale, pairs,
        K=depth, GROUPS=groups, TOP_K=top_k, BLOCK=2048, BLOCK_G=triton.next_power_of_2(groups), num_warps=4,
    )  # fmt: skip
    return coded(data, scale, x.group, x.dtype)


def product(
    x: Activations, weight: Packed, dealing: Dealing, pairs: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Each block's 128 rows times its expert's matrix.

    Args:
        x: of slots, with a scale for 128 columns.
        weight: `[E, N, K]`, with one for 128 x 128.
        dealing: slots and owners in blocks of 128 rows, contiguous (`dealt`) or masked (`masked`).
        pairs: how many there are; slots that hold this number are empty.
        weights: float32 `[pairs]`; results are multiplied and lie by pairs, float32.

    Returns:
        bfloat16 `[slots, N]`, of which rows that nobody has mean nothing; or float32 `[pairs, N]`.
    """
    (slots, owners), (_, outputs, depth) = dealing, weight.data.shape
    weighted = weights is not None
    out = torch.empty(
        pairs if weighted else len(slots), outputs, device=slots.device,
        dtype=torch.float32 if weighted else torch.bfloat16,
    )  # fmt: skip
    assert weight.scale is not None
    grouped.product[(len(owners) * triton.cdiv(outputs, COLUMNS),)](
        box(x.data.view(FP8), ROWS, 128, 8), box(weight.data.view(FP8).flatten(0, 1), COLUMNS, 128, 8), x.scale,
        weight.scale, out, slots, owners, x.scale if weights is None else weights, len(owners), pairs, outputs,
        triton.cdiv(depth, 128), weight.scale.stride(0),
        COLUMNS=COLUMNS, RASTER=RASTER, STAGES=STAGES, WEIGHTED=weighted, num_warps=4,
    )  # fmt: skip
    return out


def moe_experts(p: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Activations in FP8 before both products; what lies between these is one kernel."""
    pairs, count = ids.numel(), p.gate_up.data.shape[0]
    if pairs <= FEW_ROWS * count or not p.gate_up.rows == p.down.rows == 128:
        return portable(p, x, weights, ids)
    ids = ids.contiguous()
    dealing = dealt(ids, count, ROWS)
    rows = spread(fp8_rows(x, FP8_GROUP), dealing, ids.shape[1], pairs)
    data, scale = gate(product(rows, p.gate_up, dealing, pairs), "fp8", FP8_GROUP)
    middle = coded(data, scale, FP8_GROUP, x.dtype)
    return summed(product(middle, p.down, dealing, pairs, weights.contiguous()), ids, x.dtype)
