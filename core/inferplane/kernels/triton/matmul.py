"""Matrix products `x weight^T` of plain or quantized activations and weights: tiles, whole products, splits of K.

Entries meet in the activations' type, or as 8-bit numbers where both sides have 8 bits and the device multiplies them;
INT4 beside FP8 becomes FP8. Sums over the columns that share scales go to float32, are scaled there, and are added up
in float32: also where the hardware's own FP8 sums are shorter. int8 by rows is summed up in int32. Any M, N and K;
nothing is read on the host but shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.attention import widened
from inferplane.kernels.triton.dependent_launch import fetch, how, let_next, wait
from inferplane.kernels.triton.fp8_int4 import TOGETHER, in_fp8
from inferplane.kernels.triton.fp8_int4 import tile as tile_of_int4
from inferplane.kernels.triton.rowwise import encoded, scale_of, silu
from inferplane.kernels.triton.split_reduction import kept, last_of
from inferplane.kernels.triton.tiles import Products
from inferplane.kernels.triton.weight_packing import FP8, INT4, INT8, PLAIN, Packed

RASTER = 8
"""Tiles of rows that are done side by side, so that they find each other's weights in the cache."""
MOST_WHOLE = tl.constexpr(131072)
"""Columns of int8 whose sum an int32 holds, -128 among the weights: 131072 x 127 x 128 is below 2^31."""


@triton.jit
def entries(x, KIND: tl.constexpr, dtype: tl.constexpr):
    """Stored entries in `dtype`: KIND 0 plain, 1 FP8 bits (times 2^-8), 2 int8, 3 one INT4 entry in the low bits."""
    if KIND == 3:
        if dtype == tl.bfloat16:  # 128 + n has the bits of 128 with n in the last places
            return ((x.to(tl.int16) & 15) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
        elif dtype == tl.float16:
            return ((x.to(tl.int16) & 15) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        else:
            return (x & 15).to(tl.float32) - 8.0
    elif KIND == 0:
        return x.to(dtype)
    else:
        return widened(x, KIND, dtype)


@triton.jit
def multiply(a, b, A_KIND: tl.constexpr, B_KIND: tl.constexpr, FP8_DOT: tl.constexpr, dtype: tl.constexpr):
    """A tile's product in float32; `b` is `[K, N]`. Without 8-bit products both are widened, which is exact."""
    if A_KIND == 2 and B_KIND == 2:
        return tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
    elif A_KIND == 1 and B_KIND == 1 and FP8_DOT:
        return tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True))
    else:
        return tl.dot(entries(a, A_KIND, dtype), entries(b, B_KIND, dtype), input_precision="ieee")


@triton.jit
def whole_numbers(
    x, x_scale, x_row, x_inside, w, w_scale, n, n_inside, first, last,
    K: tl.constexpr, W_ROW: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`tile` of int8 with a scale a row on either side, at most `MOST_WHOLE` columns: summed up and scaled once."""
    within = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.int32)
    source, weight = x + x_row[:, None] * K, w + n.to(tl.int64)[None, :] * W_ROW
    for k in range(first, last, BK):
        column = k + within
        a = tl.load(source + column[None, :], mask=x_inside[:, None] & (column < K)[None, :], other=0)
        b = tl.load(weight + column[:, None], mask=n_inside[None, :] & (column < K)[:, None], other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    scaled = acc.to(tl.float32) * tl.load(w_scale + n // ROWS * GROUPS, mask=n_inside, other=0.0)[None, :]
    return scaled * tl.load(x_scale + x_row, mask=x_inside, other=0.0)[:, None]


@triton.jit
def by_turns(
    x, x_scale, x_row, x_inside, w, w_scale, w_zero, n, n_inside, first, last,
    K: tl.constexpr, W_ROW: tl.constexpr, X_ROW_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    A_KIND: tl.constexpr, X_GROUP: tl.constexpr, B_KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, FP8_DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """`tile` of any other forms: each loop turn's sums go to float32 and are scaled there."""
    KIND: tl.constexpr = 1 if A_KIND == 4 else A_KIND
    HALF: tl.constexpr = BK // 2 if B_KIND == 3 else BK
    within = tl.arange(0, HALF)
    acc = tl.zeros([BM, BN], tl.float32)
    source, weight = x + x_row[:, None] * K, w + n.to(tl.int64)[None, :] * W_ROW
    if A_KIND == 4 and X_ROW_SCALES == 0:
        fixed = tl.zeros([BM], tl.float32) + tl.load(x_scale)
    for k in range(first, last, BK):
        column = k + within
        if B_KIND == 3:
            both = tl.load(weight + (k // 2 + within)[:, None], mask=n_inside[None, :], other=0)
            a = tl.load(source + column[None, :], mask=x_inside[:, None] & (column < K)[None, :], other=0.0)
            column += HALF
            c = tl.load(source + column[None, :], mask=x_inside[:, None] & (column < K)[None, :], other=0.0)
            low, high = entries(both, 3, dtype), entries(both >> 4, 3, dtype)
            if ZERO:
                zero = tl.load(w_zero + n // ROWS * GROUPS + (k // GROUP if GROUP > 0 else 0), mask=n_inside, other=0.0)
                low, high = low - zero.to(dtype)[None, :], high - zero.to(dtype)[None, :]
            part = tl.dot(entries(a, A_KIND, dtype), low, input_precision="ieee")
            part = tl.dot(entries(c, A_KIND, dtype), high, part, input_precision="ieee")
        else:
            inside = column < K
            a = tl.load(source + column[None, :], mask=x_inside[:, None] & inside[None, :], other=0.0)
            b = tl.load(weight + column[:, None], mask=n_inside[None, :] & inside[:, None], other=0.0)
            if ZERO:
                zero = tl.load(w_zero + n // ROWS * GROUPS + (k // GROUP if GROUP > 0 else 0), mask=n_inside, other=0.0)
                left = entries(b, B_KIND, tl.float32) - zero[None, :]
                part = tl.dot(entries(a, A_KIND, dtype), left.to(dtype), input_precision="ieee")
            elif A_KIND == 4 and X_ROW_SCALES == 0:
                codes = encoded(a.to(tl.float32), fixed[:, None], True)
                part = multiply(codes, b, KIND, B_KIND, FP8_DOT, dtype)
            elif A_KIND == 4:
                row_scale = scale_of(tl.max(tl.abs(a.to(tl.float32)), 1), 448.0, False)
                codes = encoded(a.to(tl.float32), row_scale[:, None], True)
                part = multiply(codes, b, KIND, B_KIND, FP8_DOT, dtype) * row_scale[:, None]
            else:
                part = multiply(a, b, A_KIND, B_KIND, FP8_DOT, dtype)
        if GROUP > 0:
            part *= tl.load(w_scale + n // ROWS * GROUPS + k // GROUP, mask=n_inside, other=0.0)[None, :]
        if X_GROUP > 0:
            part *= tl.load(x_scale + x_row * X_ROW_SCALES + k // X_GROUP, mask=x_inside, other=0.0)[:, None]
        acc += part
    if B_KIND > 0 and GROUP == 0:
        acc *= tl.load(w_scale + n // ROWS * GROUPS, mask=n_inside, other=0.0)[None, :]
    if A_KIND > 0 and X_GROUP == 0 and (A_KIND != 4 or X_ROW_SCALES == 0):
        acc *= tl.load(x_scale + x_row * X_ROW_SCALES, mask=x_inside, other=0.0)[:, None]
    EIGHT: tl.constexpr = KIND == 1 and B_KIND == 1 and FP8_DOT
    if KIND == 1 and not EIGHT:
        acc *= 256.0
    if B_KIND == 1 and not EIGHT:
        acc *= 256.0
    return acc


@triton.jit
def one_tile(
    x, x_scale, x_row, x_inside, w, w_scale, w_zero, n, n_inside, first, last,
    K: tl.constexpr, W_ROW: tl.constexpr, X_ROW_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    A_KIND: tl.constexpr, X_GROUP: tl.constexpr, B_KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, FP8_DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """`tile` without GATED."""
    if FP8_DOT and B_KIND == 3 and (A_KIND == 1 or A_KIND == 4):
        return tile_of_int4(
            x, x_scale, x_row, x_inside, w, w_scale, n, n_inside, 0, first, last, K, W_ROW, X_ROW_SCALES, GROUPS,
            A_KIND == 4, X_GROUP, ROWS, GROUP, BM, BN, BK, False,
        )  # fmt: skip
    elif A_KIND == 2 and B_KIND == 2 and X_GROUP == 0 and GROUP == 0 and not ZERO and K <= MOST_WHOLE:
        return whole_numbers(
            x, x_scale, x_row, x_inside, w, w_scale, n, n_inside, first, last, K, W_ROW, GROUPS, ROWS, BM, BN, BK,
        )  # fmt: skip
    else:
        return by_turns(
            x, x_scale, x_row, x_inside, w, w_scale, w_zero, n, n_inside, first, last, K, W_ROW, X_ROW_SCALES, GROUPS,
            A_KIND, X_GROUP, B_KIND, ROWS, GROUP, ZERO, FP8_DOT, BM, BN, BK, dtype,
        )  # fmt: skip


@triton.jit
def tile(
    x, x_scale, x_row, x_inside, w, w_scale, w_zero, n, n_inside, outputs, first, last,
    K: tl.constexpr, W_ROW: tl.constexpr, X_ROW_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    A_KIND: tl.constexpr, X_GROUP: tl.constexpr, B_KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, FP8_DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    dtype: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Columns `first` to `last` of K: float32 `[BM, BN]`, scaled. `x_row` are rows of `x` `[., K]`, side by side.
    A_KIND 4: plain rows, coded here in FP8 with a scale for BK columns. X_ROW_SCALES 0: one scale for all rows. GATED:
    `silu` of that times the same of rows n + outputs of the weight.
    """
    if GATED and BM <= TOGETHER and FP8_DOT and B_KIND == 3 and (A_KIND == 1 or A_KIND == 4):
        return tile_of_int4(
            x, x_scale, x_row, x_inside, w, w_scale, n, n_inside, outputs, first, last, K, W_ROW, X_ROW_SCALES, GROUPS,
            A_KIND == 4, X_GROUP, ROWS, GROUP, BM, BN, BK, True,
        )  # fmt: skip
    else:
        acc = one_tile(
            x, x_scale, x_row, x_inside, w, w_scale, w_zero, n, n_inside, first, last, K, W_ROW, X_ROW_SCALES, GROUPS,
            A_KIND, X_GROUP, B_KIND, ROWS, GROUP, ZERO, FP8_DOT, BM, BN, BK, dtype,
        )  # fmt: skip
        if GATED:
            up = one_tile(
                x, x_scale, x_row, x_inside, w, w_scale, w_zero, n + outputs, n_inside, first, last, K, W_ROW,
                X_ROW_SCALES, GROUPS, A_KIND, X_GROUP, B_KIND, ROWS, GROUP, ZERO, FP8_DOT, BM, BN, BK, dtype,
            )  # fmt: skip
            acc = silu(acc) * up
        return acc


@triton.jit
def fetch_rows(w, n, first, last, W_ROW: tl.constexpr, B_KIND: tl.constexpr, FETCH: tl.constexpr):
    """Rows `n` of a weight, columns `first` to `last`, but no more than FETCH bytes of each."""
    row = w + n.to(tl.int64) * W_ROW
    if B_KIND == 3:
        fetch(row + first // 2, tl.minimum((last - first) // 2, FETCH))
    else:
        fetch(row + first, tl.minimum((last - first) * (w.dtype.element_ty.primitive_bitwidth // 8), FETCH))


@triton.jit
def _product(
    x, x_scale, w, w_scale, w_zero, bias, out, parts, counters, rows, outputs,
    K: tl.constexpr, W_ROW: tl.constexpr, X_ROW_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    A_KIND: tl.constexpr, X_GROUP: tl.constexpr, B_KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, FP8_DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    dtype: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, PART: tl.constexpr, GATED: tl.constexpr,
    RASTER: tl.constexpr, FETCH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program `(tile of the result, part of K)`. GATED: `silu` of the first half of the outputs times the second.
    FETCH: bytes of each row of the weight that are asked for before what was launched before is waited for.
    """
    down, across = tl.cdiv(rows, BM), tl.cdiv(outputs, BN)
    band = RASTER * across
    first_down = tl.program_id(0) // band * RASTER
    high = tl.minimum(down - first_down, RASTER)
    m = (first_down + tl.program_id(0) % band % high) * BM + tl.arange(0, BM)
    n = tl.program_id(0) % band // high * BN + tl.arange(0, BN)
    x_row, x_inside, n_inside = m.to(tl.int64), m < rows, n < outputs
    first = tl.program_id(1) * PART
    last = tl.minimum(first + PART, K)
    if FETCH > 0:
        row = tl.minimum(n, outputs - 1)
        fetch_rows(w, row, first, last, W_ROW, B_KIND, FETCH)
        if GATED:
            fetch_rows(w, row + outputs, first, last, W_ROW, B_KIND, FETCH)
    wait(AHEAD)
    acc = tile(
        x, x_scale, x_row, x_inside, w, w_scale, w_zero, n, n_inside, outputs, first, last, K, W_ROW, X_ROW_SCALES,
        GROUPS, A_KIND, X_GROUP, B_KIND, ROWS, GROUP, ZERO, FP8_DOT, BM, BN, BK, dtype, GATED,
    )  # fmt: skip
    let_next(AHEAD)
    inside = x_inside[:, None] & n_inside[None, :]
    if SPLITS > 1:
        mine = (tl.program_id(1) * rows + x_row)[:, None] * outputs + n[None, :]
        tl.store(parts + mine, acc, mask=inside)
        if not last_of(counters + tl.program_id(0), SPLITS):
            return
        acc = tl.zeros([BM, BN], tl.float32)
        for part in range(SPLITS):
            acc += kept(parts + (part * rows + x_row)[:, None] * outputs + n[None, :], inside)
    if BIAS:
        acc += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + x_row[:, None] * outputs + n[None, :], acc.to(out.dtype.element_ty), mask=inside)


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
CODED_HERE = 4
"""Beside the kinds of weights: plain activations that the product codes in FP8."""
FETCHED_ROWS = 64
"""Up to so many rows of activations a tile of the weight has one program, which may ask for it early."""
FETCHED_BYTES = 1024
"""Of each row of a weight: some turns of the loop, and of all programs that run at once no more than a cache holds."""
WIDE_COLUMNS = 32
"""Columns a loop turn of float32 entries: what shared memory holds."""


@dataclass(frozen=True)
class Activations:
    """Rows of a product, `[M, K]` and side by side: plain, or codes with float32 scales (FP8 as its bits).

    Args:
        data: the entries.
        scale: `[M, groups]`, or `[1]` for all of them; None for plain ones.
        group: columns that share a scale, 0 for the whole row.
        dtype: the activations' own.
        code: plain entries become FP8 as they are read, by that one scale, or with one for as many columns as a loop
            turn takes.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    group: int
    dtype: torch.dtype
    code: bool = False

    @property
    def row_scales(self) -> int:
        """Scales of a row; 0 where one holds for all."""
        return 1 if self.scale is None else self.scale.shape[-1] if self.scale.ndim == 2 else 0

    @property
    def kind(self) -> int:
        """PLAIN, FP8, INT8 or CODED_HERE."""
        if self.code:
            return CODED_HERE
        return PLAIN if self.scale is None else FP8 if self.data.dtype == torch.uint8 else INT8


def plain(x: torch.Tensor) -> Activations:
    """Rows as they are."""
    return Activations(x if x.stride(-1) == 1 and x.is_contiguous() else x.contiguous(), None, 0, x.dtype)


def coded(data: torch.Tensor, scale: torch.Tensor, group: int, dtype: torch.dtype) -> Activations:
    """What the op `quantize` gives."""
    return Activations(data.view(torch.uint8) if data.dtype == torch.float8_e4m3fn else data, scale, group, dtype)


def form(x: Activations, weight: Packed, fp8: bool) -> dict[str, object]:
    """The constants of `tile` that the operands' forms decide."""
    depth = weight.depth
    if weight.kind in (PLAIN, INT8) and not weight.group and not x.group and x.dtype == torch.float32:
        depth = WIDE_COLUMNS
    return {
        "K": weight.columns, "W_ROW": weight.data.stride(-2), "A_KIND": x.kind, "B_KIND": weight.kind,
        "X_ROW_SCALES": x.row_scales, "X_GROUP": x.group, "ROWS": weight.rows,
        "GROUPS": 1 if weight.scale is None else weight.scale.shape[-1], "GROUP": weight.group,
        "ZERO": weight.zero is not None, "FP8_DOT": fp8 and (weight.kind != INT4 or in_fp8(weight)),
        "BK": depth,
        "dtype": tl.bfloat16 if x.kind != PLAIN and x.dtype == torch.float32 else DTYPES[x.dtype],
    }  # fmt: skip


def product(
    x: Activations,
    weight: Packed,
    products: Products,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """`x weight^T + bias`, `[M, N]`; gated: `silu` of its first half of columns times its second, `[M, N / 2]`.

    Args:
        x: `[M, K]`; its scales' groups are whole rows or the weight's.
        weight: `[N, K]`.
        products: tile sizes.
        bias: `[N]`, or None.
        out_dtype: of the result; by default the activations'.
        gated: multiply the halves.
    """
    rows = x.data.shape[0]
    outputs = weight.outputs // 2 if gated else weight.outputs
    out = torch.empty(rows, outputs, device=x.data.device, dtype=out_dtype or x.dtype)
    if not rows:
        return out
    chosen = products.of_experts(rows) if gated else products.choose(rows)
    constants = form(x, weight, products.fp8)
    depth = weight.depth
    splits = 1 if gated else products.splits(chosen, rows, outputs, weight.columns)
    part = triton.cdiv(triton.cdiv(weight.columns, splits), depth) * depth
    splits = triton.cdiv(weight.columns, part)
    parts = out if splits == 1 else torch.empty(splits, rows, outputs, device=out.device)
    tiles = triton.cdiv(rows, chosen.rows) * triton.cdiv(outputs, chosen.columns)
    counters = out if splits == 1 else products.counters.of(out.device, tiles)
    scale = lambda s: out if s is None else s  # noqa: E731 - what is not there is not read
    _product[(tiles, splits)](
        x.data, scale(x.scale), weight.data, scale(weight.scale), scale(weight.zero), scale(bias), out, parts, counters,
        rows, outputs, **constants, BM=chosen.rows, BN=chosen.columns, BIAS=bias is not None, SPLITS=splits, PART=part,
        GATED=gated, RASTER=RASTER, FETCH=FETCHED_BYTES if products.ahead and rows <= FETCHED_ROWS else 0,
        num_warps=chosen.warps, num_stages=chosen.stages, **how(products.ahead),
    )  # fmt: skip
    return out
