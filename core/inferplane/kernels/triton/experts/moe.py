"""Mixture-of-experts layers: pairs assigned to blocks of one expert each, two grouped products, a sum per token.

A pair is a token and one of its experts; pair `t k + j` is token t's j-th of k experts. A block is a fixed number of
rows of one expert, and a slot is one row of a block, which holds a pair or is empty. Blocks are assigned on the device
from ids alone, and their number is bounded by shapes, so a captured step stays right when other experts are chosen.

The first product gathers its rows, and ends with `silu(gate) * up`, quantized to 8 bits if requested. The second ends
with the routing weight and, where no other rank has experts, the sum over a token's pairs, in the order of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.activations import FUNCTIONS, clamp_gate
from inferplane.kernels.triton.dependent_launch import allow_next, launch_options, wait_for_previous
from inferplane.kernels.triton.experts.blocks import allocate_blocks, assign_blocks, assign_one_block
from inferplane.kernels.triton.linear import FP8_GROUP, make_fp8_input, make_int8_input
from inferplane.kernels.triton.matmul import matmul_tile, tile_constants
from inferplane.kernels.triton.matmul_input import MatmulInput, make_plain_input, make_quantized_input
from inferplane.kernels.triton.rowwise import largest_magnitude, quant_scale, quantize_entries
from inferplane.kernels.triton.split_reduction import are_last_arrivals, load_shared_part
from inferplane.kernels.triton.tiles import Counters, Product, Products
from inferplane.kernels.triton.weight_packing import DEPTH, PackedWeight


@triton.jit
def _grouped(
    x, x_scale, w, w_scale, w_zero, out, out_scale, weights, slots, owners, ids, parts, counters, base,
    bias, alpha, limit, pairs, outputs, w_step, scale_step,
    K: tl.constexpr, W_ROW: tl.constexpr, X_ROW_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    A_KIND: tl.constexpr, X_GROUP: tl.constexpr, B_KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, FP8_DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    dtype: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, QUANTIZE: tl.constexpr, WEIGHTED: tl.constexpr,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, ASSIGNS: tl.constexpr, SUMS: tl.constexpr, BASE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Program `(block, columns)`: the block's rows times BN columns of its expert's matrix.

    TOP_K: rows of `x` are tokens, each shared by this many pairs; 0: they are slots.
    GATED: as in `matmul_tile`. QUANTIZE: results are stored with a scale per row and program, 1 in FP8, 2 in int8.
    `bias` `[E, rows of the matrix]`: added to the product. `alpha`: rows of the matrix alternate, gate and up, and
    results are gated by `clamp_gate`.
    WEIGHTED: results are multiplied by their pairs' weights and stored by pair.
    ASSIGNS > 0: the blocks are not assigned yet; each program assigns its own, reading ASSIGNS pairs at a time, and
    stores slots and owners for the second product.
    SUMS > 0: the program that stores the last of a token's SUMS pairs adds them up; BASE: and the token's `base` row.
    """
    wait_for_previous(AHEAD)  # first of all: which expert's matrix a program needs is known by then
    block = tl.program_id(0)
    slot = block.to(tl.int64) * BM + tl.arange(0, BM)
    if ASSIGNS > 0:
        owner, pair = assign_one_block(ids, block, pairs, EXPERTS, BINS, BM, ASSIGNS)
        if tl.program_id(1) == 0:
            tl.store(owners + block, owner)
            tl.store(slots + slot, pair)
    else:
        owner = tl.load(owners + block)
        pair = tl.load(slots + slot, mask=slot * 0 + owner >= 0, other=0)
    if owner < 0:
        return
    expert = owner.to(tl.int64)
    real = pair < pairs
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    n_inside = n < outputs
    if TOP_K > 0:
        x_row = (pair // TOP_K).to(tl.int64)
    else:
        x_row = slot
    w += expert * w_step
    w_scale += expert * scale_step
    w_zero += expert * scale_step
    row = n if alpha is None else 2 * n
    acc = matmul_tile(
        x, x_scale, x_row, real, w, w_scale, w_zero, row, n_inside, outputs, 0, K, K, W_ROW, X_ROW_SCALES, GROUPS,
        A_KIND, X_GROUP, B_KIND, ROWS, GROUP, ZERO, FP8_DOT, BM, BN, BK, dtype, GATED,
    )  # fmt: skip
    if alpha is not None:
        up = matmul_tile(
            x, x_scale, x_row, real, w, w_scale, w_zero, row + 1, n_inside, outputs, 0, K, K, W_ROW, X_ROW_SCALES,
            GROUPS, A_KIND, X_GROUP, B_KIND, ROWS, GROUP, ZERO, FP8_DOT, BM, BN, BK, dtype, GATED,
        )  # fmt: skip
        both = bias + expert * (2 * outputs) + row
        acc += tl.load(both, mask=n_inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(both + 1, mask=n_inside, other=0.0).to(tl.float32)[None, :]
        acc = clamp_gate(acc, up, alpha, limit)
    elif bias is not None:
        acc += tl.load(bias + expert * outputs + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
    allow_next(AHEAD)
    target, inside = slot, real[:, None] & n_inside[None, :]
    if WEIGHTED:
        pair = tl.load(slots + slot)  # again, instead of held in registers while there are products
        real = pair < pairs
        inside = real[:, None] & n_inside[None, :]
        target = pair.to(tl.int64)
        acc *= tl.load(weights + pair, mask=real, other=0.0).to(tl.float32)[:, None]
    if QUANTIZE > 0:
        scale = quant_scale(largest_magnitude(acc, 1), 448.0 if QUANTIZE == 1 else 127.0, False)
        tl.store(out_scale + target * tl.num_programs(1) + tl.program_id(1), scale, mask=real)
        place = out + target[:, None] * outputs + n[None, :]
        tl.store(place, quantize_entries(acc, scale[:, None], QUANTIZE == 1), mask=inside)
        return
    if SUMS > 0:
        tl.store(parts + target[:, None] * outputs + n[None, :], acc, mask=inside)
        target = target // SUMS
        last = are_last_arrivals(counters + target * tl.num_programs(1) + tl.program_id(1), SUMS, real)
        inside = last[:, None] & n_inside[None, :]
        acc = tl.zeros([BM, BN], tl.float32)
        for j in range(SUMS):
            acc += load_shared_part(parts + (target * SUMS + j)[:, None] * outputs + n[None, :], inside)
        if BASE:
            acc += tl.load(base + target[:, None] * outputs + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target[:, None] * outputs + n[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum(parts, ids, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Program `(token, columns)` stores the sum of the token's pairs; those of experts on other ranks (id -1) are left
    out.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    acc = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        here = tl.where(tl.load(ids + token * TOP_K + j) < 0, 0, width)
        acc += tl.load(parts + (token * TOP_K + j) * width + column, mask=column < here, other=0.0)
    tl.store(out + token * width + column, acc.to(out.dtype.element_ty), mask=inside)


QUANTIZED_FORMATS = {"fp8": (1, torch.uint8), "int8": (2, torch.int8)}
"""Formats of quantized results: the kernel's QUANTIZE, and the dtype in which they are stored."""
MAX_PAIRS_ASSIGNED_IN_KERNEL = 1024
"""Up to this many pairs, each program of the first product assigns its own block: that is cheaper than a launch."""


@dataclass(frozen=True)
class PairSum:
    """Asks the second product to add up each token's pairs.

    Args:
        counters: zeros, one per token and tile of columns (`Counters`).
        top_k: pairs per token.
        base: `[T, N]` to be added to the sum (a shared MLP's result), or None.
    """

    counters: Counters
    top_k: int
    base: torch.Tensor | None = None


@dataclass(frozen=True)
class GroupedResult:
    """In which form a grouped product returns its results.

    Args:
        gated: `silu` of the first half of the columns times the second.
        quantize: "fp8" or "int8": quantize the result, a scale per 128 columns; "": leave it.
        weights: float32 `[pairs]`; results are multiplied by them and lie by pair, float32.
        pair_sum: with `weights`: results are added up by token, and lie by token in the dtype of the input.
        bias: `[E, N]`, added to the product; None: nothing is.
        clamp: factor and limit of op `clamped_experts`, whose rows of gate and up alternate; None: not that gate.
    """

    gated: bool = False
    quantize: str = ""
    weights: torch.Tensor | None = None
    pair_sum: PairSum | None = None
    bias: torch.Tensor | None = None
    clamp: tuple[float, float] | None = None


AS_THEY_ARE = GroupedResult()


def multiply_grouped(
    x: MatmulInput,
    weight: PackedWeight,
    assignment: tuple[torch.Tensor, torch.Tensor],
    tile_sizes: Product,
    result: GroupedResult = AS_THEY_ARE,
    *,
    pairs: int,
    top_k: int = 0,
    fp8: bool = False,
    assign_from: torch.Tensor | None = None,
    ahead: bool = False,
) -> MatmulInput:
    """Multiply each block's rows by its expert's matrix (a grouped GEMM).

    Args:
        x: rows of tokens if `top_k` is given, else of slots.
        weight: `[E, N, K]`.
        assignment: slots and owners, in blocks of `tile_sizes.rows`.
        tile_sizes: of a program; a quantized result takes 128 columns.
        result: the form of the results.
        pairs: number of pairs; a slot that holds this number is empty.
        top_k: pairs per token.
        fp8: the device multiplies FP8 numbers.
        assign_from: ids `[T, k]`, of which `assignment` is filled in; at most `MAX_PAIRS_ASSIGNED_IN_KERNEL` pairs.
        ahead: a dependent launch (`dependent_launch.py`).
    """
    slots, owners = assignment
    gated, quantize, weights, pair_sum = result.gated, result.quantize, result.weights, result.pair_sum
    outputs = weight.outputs // 2 if gated or result.clamp else weight.outputs
    columns = DEPTH if quantize else tile_sizes.columns
    device, tiles = x.data.device, triton.cdiv(outputs, columns)
    kind, stored_as = QUANTIZED_FORMATS[quantize] if quantize else (0, x.dtype)
    if not quantize and weights is not None and pair_sum is None:
        stored_as = torch.float32
    rows = len(slots) if weights is None else pairs if pair_sum is None else pairs // pair_sum.top_k
    out = torch.empty(rows, outputs, device=device, dtype=stored_as)
    scale = torch.empty(len(slots), tiles, device=device) if quantize else None
    parts = None if pair_sum is None else torch.empty(pairs, outputs, device=device)
    counters = None if pair_sum is None else pair_sum.counters.of(device, rows * tiles)
    base = None if pair_sum is None else pair_sum.base
    other = lambda t: out if t is None else t  # noqa: E731 - what is not there is not read
    count = weight.data.shape[0]
    _grouped[(len(owners), tiles)](
        x.data, other(x.scale), weight.data, other(weight.scale), other(weight.zero), out, other(scale), other(weights),
        slots, owners, other(assign_from), other(parts), other(counters), other(base),
        result.bias, *(result.clamp or (None, None)),
        pairs, outputs, weight.data.stride(0), 0 if weight.scale is None else weight.scale.stride(0),
        **tile_constants(x, weight, fp8), BM=tile_sizes.rows, BN=columns, TOP_K=top_k,
        GATED=FUNCTIONS["silu"] if gated else 0, QUANTIZE=kind, WEIGHTED=weights is not None, EXPERTS=count,
        BINS=triton.next_power_of_2(count + 1),
        ASSIGNS=0 if assign_from is None else max(16, min(256, triton.next_power_of_2(pairs))),
        SUMS=0 if pair_sum is None else pair_sum.top_k, BASE=base is not None,
        num_warps=tile_sizes.warps, num_stages=tile_sizes.stages, **launch_options(ahead),
    )  # fmt: skip
    return make_plain_input(out) if scale is None else make_quantized_input(out, scale, DEPTH, x.dtype)


def run_experts(
    view: Any,
    products: Products,
    x: MatmulInput,
    weights: torch.Tensor,
    ids: torch.Tensor,
    quantize: str = "",
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op `moe_experts` or `clamped_experts`, `[T, D]`: both grouped products, then the sum over a token's experts.

    Args:
        view: weights `gate_up` and `down`, and `partial`: other ranks have experts too, whose pairs are left out of the
            sum; of `clamped_experts` also biases, `alpha` and `limit`.
        products: tile sizes.
        x: activations, plain or quantized.
        weights: routing weights `[T, k]`.
        ids: chosen experts `[T, k]`, -1 for one on another rank.
        quantize: format ("fp8", "int8") of what lies between the products; "": it stays in the activations' dtype.
        base: `[T, D]` to be added to the result, or None; not with `partial`.
    """
    tokens, top_k = ids.shape
    if not tokens:
        return torch.empty(0, view.down.outputs, device=ids.device, dtype=x.dtype)
    pairs, count = tokens * top_k, view.gate_up.data.shape[0]
    tile_sizes, ids = products.choose_for_experts(triton.cdiv(pairs, count)), ids.contiguous()
    here = pairs <= MAX_PAIRS_ASSIGNED_IN_KERNEL and tile_sizes.rows <= 16
    assignment = (allocate_blocks if here else assign_blocks)(ids, count, tile_sizes.rows)
    common: dict[str, Any] = {"pairs": pairs, "fp8": products.fp8, "ahead": products.ahead}
    scale = view.down.static_scale if quantize == "fp8" else None
    clamp = (view.alpha, view.limit) if hasattr(view, "alpha") else None
    up_bias, down_bias = (None, None) if clamp is None else (view.gate_up_bias, view.down_bias)
    result = GroupedResult(clamp is None, quantize if scale is None else "", bias=up_bias, clamp=clamp)
    assign_from = ids if here else None
    inner = multiply_grouped(
        x, view.gate_up, assignment, tile_sizes, result, top_k=top_k, assign_from=assign_from, **common
    )
    inner = inner if scale is None else replace(inner, scale=scale, quantize=True)
    pair_sum = None if view.partial else PairSum(products.counters, top_k, base)
    result = GroupedResult(weights=weights.contiguous(), pair_sum=pair_sum, bias=down_bias)
    out = multiply_grouped(inner, view.down, assignment, tile_sizes, result, **common).data
    return sum_pairs(out, ids, x.dtype) if view.partial else out


def sum_pairs(parts: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add up the results of pairs, `parts` `[T k, N]` float32, by token, in the order of its experts: `[T, N]` of
    `dtype`. Rows of experts on other ranks (id -1 in `ids`) are not read.
    """
    (tokens, top_k), width = ids.shape, parts.shape[1]
    out = torch.empty(tokens, width, device=ids.device, dtype=dtype)
    _sum[(tokens, triton.cdiv(width, 1024))](parts, ids, out, width, TOP_K=top_k, BLOCK=1024, num_warps=4)
    return out


def moe_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The ops `moe_experts` and `clamped_experts` with activations unquantized."""
    return run_experts(view, view.prepared, make_plain_input(x), weights, ids)


def moe_experts_fp8(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The op `moe_experts` with activations in FP8 before both products, a scale per 128 columns."""
    rows = make_fp8_input(x, view.gate_up, FP8_GROUP, view.prepared)
    return run_experts(view, view.prepared, rows, weights, ids, "fp8")


def moe_experts_int8(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The op `moe_experts` with activations in int8: a scale per token, between the products one per 128 columns."""
    return run_experts(view, view.prepared, make_int8_input(x, view.prepared), weights, ids, "int8")
