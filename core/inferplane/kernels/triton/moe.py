"""Experts: pairs of token and expert dealt into blocks of one expert's rows, two grouped products, a sum a token.

What the blocks hold is found on the device, from ids alone, and their number is bounded by shapes: a recorded step
stays right when other experts are chosen. Rows are gathered by the first product, whose end is `silu(gate) * up`, coded
in 8 bits if asked for; the second one's end is the routing weight, and where no other rank has experts, the sum over a
token's pairs. Sums are in the order of a token's experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.errors import KernelError
from inferplane.kernels.triton.dependent_launch import how as launched
from inferplane.kernels.triton.dependent_launch import let_next, wait
from inferplane.kernels.triton.linear import FP8_GROUP, fp8_input, int8_input, static_of
from inferplane.kernels.triton.matmul import Activations, coded, form, plain, tile
from inferplane.kernels.triton.rowwise import encoded, scale_of
from inferplane.kernels.triton.split_reduction import kept, last_of_each
from inferplane.kernels.triton.tiles import Counters, Product, Products
from inferplane.kernels.triton.weight_packing import DEPTH, Packed


@triton.jit
def _deal(
    ids, slots, owners, pairs, blocks,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e places the pairs of expert e, the one behind the last marks the blocks that nobody needs."""
    me, bin, within = tl.program_id(0), tl.arange(0, BINS), tl.arange(0, CHUNK)
    count = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        expert = tl.load(ids + start + within, mask=start + within < pairs, other=-1).to(tl.int32)
        count += tl.histogram(tl.where(expert < 0, EXPERTS, expert), BINS)
    need = tl.where(bin < EXPERTS, tl.cdiv(count, ROWS), 0)
    first = tl.sum(tl.where(bin < me, need, 0), 0)
    mine = tl.sum(tl.where(bin == me, need, 0), 0)
    seen = 0
    if me < EXPERTS:
        for start in range(0, pairs, CHUNK):
            expert = tl.load(ids + start + within, mask=start + within < pairs, other=-1).to(tl.int32)
            here = (expert == me).to(tl.int32)
            tl.store(slots + first * ROWS + seen + tl.cumsum(here, 0) - 1, start + within, mask=here > 0)
            seen += tl.sum(here, 0)
        row = seen + tl.arange(0, ROWS)
        tl.store(slots + first * ROWS + row, tl.full([ROWS], 0, tl.int32) + pairs, mask=row < mine * ROWS)
        last = first + mine
    else:
        last = blocks
    for start in range(first, last, CHUNK):
        owner = tl.where(me < EXPERTS, me, -1)
        tl.store(owners + start + within, tl.full([CHUNK], 0, tl.int32) + owner, mask=start + within < last)


@triton.jit
def _dealt_here(ids, block, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """What `_deal` finds, for one block: its expert or -1, and the pair in each of its rows."""
    within, bin, row = tl.arange(0, CHUNK), tl.arange(0, BINS), tl.arange(0, ROWS)
    count = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        expert = tl.load(ids + start + within, mask=start + within < pairs, other=-1).to(tl.int32)
        count += tl.histogram(tl.where(expert < 0, EXPERTS, expert), BINS)
    need = tl.where(bin < EXPERTS, tl.cdiv(count, ROWS), 0)
    behind = tl.cumsum(need, 0)
    owner = tl.sum((behind <= block).to(tl.int32), 0)
    seen = (tl.sum(tl.where(bin == owner, behind - need, 0), 0) - block) * ROWS
    pair = tl.zeros([ROWS], tl.int32) + pairs
    for start in range(0, pairs, CHUNK):
        expert = tl.load(ids + start + within, mask=start + within < pairs, other=-1).to(tl.int32)
        here = expert == owner
        rank = seen + tl.cumsum(here.to(tl.int32), 0) - 1
        mine = here[None, :] & (rank[None, :] == row[:, None])
        pair += tl.sum(tl.where(mine, (start - pairs) + within[None, :], 0), 1)
        seen += tl.sum(here.to(tl.int32), 0)
    return tl.where(owner < EXPERTS, owner, -1), pair


@triton.jit
def _grouped(
    x, x_scale, w, w_scale, w_zero, out, out_scale, weights, slots, owners, ids, parts, counters, base,
    pairs, outputs, w_step, scale_step,
    K: tl.constexpr, W_ROW: tl.constexpr, X_ROW_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    A_KIND: tl.constexpr, X_GROUP: tl.constexpr, B_KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, FP8_DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    dtype: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, CODED: tl.constexpr, WEIGHTED: tl.constexpr,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, DEALS: tl.constexpr, JOINS: tl.constexpr, BASE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Program `(block, columns)`. TOP_K: rows are of tokens, which so many pairs share; 0: of slots. GATED as in
    `product`, CODED with a scale a row and program: 1 in FP8, 2 in int8. WEIGHTED: results go to their pairs, times
    their weights.
    DEALS: slots and owners are not there yet; pairs are dealt here, so many at a time, and noted for the next product.
    JOINS: the last of a token's so many pairs adds them up, and the token's row of `base` to them with BASE.
    """
    wait(AHEAD)  # first of all: which expert's matrix a program needs is known by then
    block = tl.program_id(0)
    slot = block.to(tl.int64) * BM + tl.arange(0, BM)
    if DEALS > 0:
        owner, pair = _dealt_here(ids, block, pairs, EXPERTS, BINS, BM, DEALS)
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
    acc = tile(
        x, x_scale, x_row, real, w, w_scale, w_zero, n, n_inside, outputs, 0, K, K, W_ROW, X_ROW_SCALES, GROUPS,
        A_KIND, X_GROUP, B_KIND, ROWS, GROUP, ZERO, FP8_DOT, BM, BN, BK, dtype, GATED,
    )  # fmt: skip
    let_next(AHEAD)
    target, inside = slot, real[:, None] & n_inside[None, :]
    if WEIGHTED:
        pair = tl.load(slots + slot)  # again, instead of held in registers while there are products
        real = pair < pairs
        inside = real[:, None] & n_inside[None, :]
        target = pair.to(tl.int64)
        acc *= tl.load(weights + pair, mask=real, other=0.0).to(tl.float32)[:, None]
    if CODED > 0:
        scale = scale_of(tl.max(tl.abs(acc), 1), 448.0 if CODED == 1 else 127.0, False)
        tl.store(out_scale + target * tl.num_programs(1) + tl.program_id(1), scale, mask=real)
        tl.store(out + target[:, None] * outputs + n[None, :], encoded(acc, scale[:, None], CODED == 1), mask=inside)
        return
    if JOINS > 0:
        tl.store(parts + target[:, None] * outputs + n[None, :], acc, mask=inside)
        target = target // JOINS
        last = last_of_each(counters + target * tl.num_programs(1) + tl.program_id(1), JOINS, real)
        inside = last[:, None] & n_inside[None, :]
        acc = tl.zeros([BM, BN], tl.float32)
        for j in range(JOINS):
            acc += kept(parts + (target * JOINS + j)[:, None] * outputs + n[None, :], inside)
        if BASE:
            acc += tl.load(base + target[:, None] * outputs + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target[:, None] * outputs + n[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum(parts, ids, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """A token's pairs added up; those of experts elsewhere (id -1) have no part."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    acc = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        here = tl.where(tl.load(ids + token * TOP_K + j) < 0, 0, width)
        acc += tl.load(parts + (token * TOP_K + j) * width + column, mask=column < here, other=0.0)
    tl.store(out + token * width + column, acc.to(out.dtype.element_ty), mask=inside)


CODES = {"fp8": (1, torch.uint8), "int8": (2, torch.int8)}
"""Formats of coded results: CODED of the kernel, and how they are stored."""
DEALT_HERE = 1024
"""Pairs that the programs of the first product deal by themselves, each for its own block."""


def undealt(ids: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and owners as of `dealt`, for `grouped` to fill in."""
    blocks = triton.cdiv(ids.numel() + min(experts, ids.numel()) * (rows - 1), rows)
    slots = torch.empty(blocks * rows, device=ids.device, dtype=torch.int32)
    return slots, torch.empty(blocks, device=ids.device, dtype=torch.int32)


def dealt(ids: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs by expert, each expert's rows filled up to whole blocks: the contiguous form.

    Args:
        ids: `[T, k]`, -1 for an expert elsewhere.
        experts: how many there are.
        rows: of a block.

    Returns:
        int32 slots `[blocks * rows]`, the pair `t k + j` in each or `T k` where there is none, and owners `[blocks]`,
        each block's expert or -1. Slots of blocks without an owner are not written.
    """
    slots, owners = undealt(ids, experts, rows)
    pairs = ids.numel()
    _deal[(experts + 1,)](
        ids.contiguous(), slots, owners, pairs, len(owners),
        EXPERTS=experts, BINS=triton.next_power_of_2(experts + 1), ROWS=rows,
        CHUNK=max(64, min(1024, triton.next_power_of_2(pairs))), num_warps=4,
    )  # fmt: skip
    return slots, owners


def masked(counts: torch.Tensor, capacity: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and owners of the masked form: `capacity` rows an expert, of which the first `counts` are taken.

    Args:
        counts: int32 `[E]`, on the device.
        capacity: a multiple of `rows`.
        rows: of a block.

    Raises:
        KernelError: a block would have rows of two experts.
    """
    if capacity % rows:
        raise KernelError(f"{capacity} rows an expert in blocks of {rows}.", remedy="make it a multiple of a block")
    place = torch.arange(capacity, device=counts.device, dtype=torch.int32)
    expert = torch.arange(len(counts), device=counts.device, dtype=torch.int32)[:, None]
    size = len(counts) * capacity
    slots = torch.where(place < counts[:, None], expert * capacity + place, size).int().flatten()
    owners = torch.where(place[::rows] < counts[:, None], expert, -1).int().flatten()
    return slots, owners


@dataclass(frozen=True)
class Sum:
    """How a second product ends: each token's pairs added up.

    Args:
        counters: zeros, one a token and tile of columns (`Counters`).
        top_k: pairs a token.
        base: `[T, N]` to be added too, or None.
    """

    counters: Counters
    top_k: int
    base: torch.Tensor | None = None


def grouped(
    x: Activations,
    weight: Packed,
    dealing: tuple[torch.Tensor, torch.Tensor],
    how: Product,
    *,
    pairs: int,
    top_k: int = 0,
    gated: bool = False,
    code: str = "",
    weights: torch.Tensor | None = None,
    fp8: bool = False,
    deal: torch.Tensor | None = None,
    join: Sum | None = None,
    ahead: bool = False,
) -> Activations:
    """Each block's rows times its expert's matrix.

    Args:
        x: of tokens with `top_k`, of slots without.
        weight: `[E, N, K]`.
        dealing: slots and owners, in blocks of `how.rows`.
        how: tile sizes; coding takes 128 columns.
        pairs: how many there are; slots that hold this number are empty.
        top_k: pairs a token.
        gated: `silu` of the first half of the columns times the second.
        code: "fp8" or "int8": the result coded so, a scale for 128 columns; "": as it is.
        weights: float32 `[pairs]`; results are multiplied and lie by pairs, float32.
        fp8: the device multiplies FP8 numbers.
        deal: ids `[T, k]` of at most `DEALT_HERE` pairs that the dealing is still to be made from.
        join: with `weights`: results are added up, and lie by tokens in the dtype of `x`.
        ahead: see `ahead.py`.
    """
    slots, owners = dealing
    outputs = weight.outputs // 2 if gated else weight.outputs
    columns = DEPTH if code else how.columns
    device, tiles = x.data.device, triton.cdiv(outputs, columns)
    kind = CODES[code][1] if code else x.dtype if weights is None or join is not None else torch.float32
    rows = len(slots) if weights is None else pairs if join is None else pairs // join.top_k
    out = torch.empty(rows, outputs, device=device, dtype=kind)
    scale = torch.empty(len(slots), tiles, device=device) if code else None
    parts = None if join is None else torch.empty(pairs, outputs, device=device)
    counters = None if join is None else join.counters.of(device, rows * tiles)
    base = None if join is None else join.base
    other = lambda t: out if t is None else t  # noqa: E731 - what is not there is not read
    count = weight.data.shape[0]
    _grouped[(len(owners), tiles)](
        x.data, other(x.scale), weight.data, other(weight.scale), other(weight.zero), out, other(scale), other(weights),
        slots, owners, other(deal), other(parts), other(counters), other(base),
        pairs, outputs, weight.data.stride(0), 0 if weight.scale is None else weight.scale.stride(0),
        **form(x, weight, fp8), BM=how.rows, BN=columns, TOP_K=top_k, GATED=gated,
        CODED=CODES[code][0] if code else 0,
        WEIGHTED=weights is not None, EXPERTS=count, BINS=triton.next_power_of_2(count + 1),
        DEALS=0 if deal is None else max(16, min(256, triton.next_power_of_2(pairs))),
        JOINS=0 if join is None else join.top_k, BASE=base is not None, num_warps=how.warps, num_stages=how.stages,
        **launched(ahead),
    )  # fmt: skip
    return plain(out) if scale is None else coded(out, scale, DEPTH, x.dtype)


def experts(
    p: Any,
    products: Products,
    x: Activations,
    weights: torch.Tensor,
    ids: torch.Tensor,
    code: str = "",
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op, from activations plain or coded, with a middle in `code` if asked for; `base` `[T, D]` is added to it."""
    tokens, top_k = ids.shape
    if not tokens:
        return torch.empty(0, p.down.outputs, device=ids.device, dtype=x.dtype)
    pairs, count = tokens * top_k, p.gate_up.data.shape[0]
    how, ids = products.of_experts(triton.cdiv(pairs, count)), ids.contiguous()
    here = pairs <= DEALT_HERE and how.rows <= 16
    dealing = (undealt if here else dealt)(ids, count, how.rows)
    common: dict[str, Any] = {"pairs": pairs, "fp8": products.fp8, "ahead": products.ahead}
    scale = static_of(p.down) if code == "fp8" else None  # of the middle, where the second product brings one
    middle = grouped(
        x, p.gate_up, dealing, how, top_k=top_k, gated=True, code=code if scale is None else "",
        deal=ids if here else None, **common,
    )  # fmt: skip
    middle = middle if scale is None else replace(middle, scale=scale, code=True)
    weights = weights.contiguous()
    if not p.partial:
        join = Sum(products.counters, top_k, base)
        return grouped(middle, p.down, dealing, how, weights=weights, join=join, **common).data
    return summed(grouped(middle, p.down, dealing, how, weights=weights, **common).data, ids, x.dtype)


def summed(parts: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Results of pairs, float32 `[T k, N]`, added up by tokens; rows of experts elsewhere are not read."""
    (tokens, top_k), width = ids.shape, parts.shape[1]
    out = torch.empty(tokens, width, device=ids.device, dtype=dtype)
    _sum[(tokens, triton.cdiv(width, 1024))](parts, ids, out, width, TOP_K=top_k, BLOCK=1024, num_warps=4)
    return out


def moe_experts(p: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Activations as they are."""
    return experts(p, p.prepared, plain(x), weights, ids)


def moe_experts_fp8(p: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Activations in FP8, a scale for 128 columns, before both products."""
    return experts(p, p.prepared, fp8_input(x, p.gate_up, FP8_GROUP, p.prepared), weights, ids, "fp8")


def moe_experts_int8(p: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Activations in int8: with a scale a token, and between the products for 128 columns."""
    return experts(p, p.prepared, int8_input(x, p.prepared), weights, ids, "int8")
