"""Matrix products `x weight^T` of plain or quantized activations and weights: a tile, the product, its split along K.

Numbers are multiplied in the activations' dtype, or as 8-bit numbers where both sides have 8 bits and the device
multiplies them; INT4 beside FP8 becomes FP8. Sums over the columns that share scales are scaled and added up in
float32, also where the hardware's own FP8 sums are shorter. int8 with scales per row is summed in int32. M, N and K may
be anything; the host reads nothing but shapes.

The device functions name the sizes so: tiles are BM rows by BN columns, and a loop iteration takes BK columns of K. A
KIND says how numbers are stored: 0 plain, 1 FP8 as its bits, 2 int8, 3 INT4, 4 MXFP4 and 5 NVFP4 two to a byte;
A_KIND 4 is plain activations that the product quantizes to FP8. GROUP and X_GROUP are the columns that share a scale, 0
for a whole row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.activations import FUNCTIONS, activate
from inferplane.kernels.triton.attention import widen_entries
from inferplane.kernels.triton.dependent_launch import allow_next, launch_options, prefetch_l2, wait_for_previous
from inferplane.kernels.triton.fp8_int4 import MAX_FUSED_GATE_ROWS, is_multiplied_in_fp8, tile_fp8_int4
from inferplane.kernels.triton.matmul_input import MatmulInput
from inferplane.kernels.triton.rowwise import largest_magnitude, quant_scale, quantize_entries
from inferplane.kernels.triton.split_reduction import is_last_arrival, load_shared_part
from inferplane.kernels.triton.tiles import Products
from inferplane.kernels.triton.weight_packing import INT4, INT8, PLAIN, PackedWeight

RASTER = 8
"""Tiles of rows that run side by side, so that they find each other's weights in the L2 cache."""
MAX_INT32_COLUMNS = tl.constexpr(131072)
"""Columns of int8 whose products an int32 can sum, -128 among the weights: 131072 x 127 x 128 is below 2^31."""


@triton.jit
def convert_entries(x, KIND: tl.constexpr, dtype: tl.constexpr):
    """Stored entries `x` as numbers of `dtype`, without their scales, by KIND (0 plain, 1 FP8, 2 int8, 3 INT4, 4
    and 5 e2m1). FP8 comes out times 2^-8, for which the caller makes up. Of INT4, the low four bits of `x` hold the
    entry plus 8, of e2m1 the entry.
    """
    if KIND == 3:
        if dtype == tl.bfloat16:  # 128 + n has the bits of 128 with n in the last places
            return ((x.to(tl.int16) & 15) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
        elif dtype == tl.float16:
            return ((x.to(tl.int16) & 15) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        else:
            return (x & 15).to(tl.float32) - 8.0
    elif KIND >= 4:
        bits = ((x & 8).to(tl.uint16) << 12) | ((x & 7).to(tl.uint16) << 9)
        return (bits.to(tl.float16, bitcast=True) * 16384.0).to(dtype)  # a float16's exponent is 14 greater
    elif KIND == 0:
        return x.to(dtype)
    else:
        return widen_entries(x, KIND, dtype)


@triton.jit
def scale_entries(x, scale, KIND: tl.constexpr, dtype: tl.constexpr):
    """Entries `x` `[K, N]`, float32, times scales `[N]`, rounded to `dtype`. With KIND 4 the scales are exponents plus
    127 in 8 bits without a sign, NaN of 255. Scaled results would be one more tile of float32 in registers.
    """
    if KIND == 4:
        bits = tl.maximum(scale.to(tl.int32) << 23, 0x400000)  # 2^-127 has no leading 1
        factor = tl.where(scale == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    else:
        factor = scale.to(tl.float32)
    return (x * factor[None, :]).to(dtype)


@triton.jit
def convert_activations(x, KIND: tl.constexpr, STATIC: tl.constexpr, dtype: tl.constexpr):
    """`convert_entries` of activations, which may be NaN in FP8 beside a STATIC scale (another is NaN itself)."""
    y = convert_entries(x, KIND, dtype)
    return tl.where((x & 0x7F) == 0x7F, float("nan"), y).to(dtype) if KIND == 1 and STATIC else y


@triton.jit
def multiply_tiles(
    a, b, A_KIND: tl.constexpr, B_KIND: tl.constexpr, STATIC: tl.constexpr, FP8_DOT: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """The product of tiles `a` `[M, K]` and `b` `[K, N]` in float32.

    Where the device does not multiply 8-bit numbers, both are widened first, which is exact.
    """
    if A_KIND == 2 and B_KIND == 2:
        return tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
    elif A_KIND == 1 and B_KIND == 1 and FP8_DOT:
        return tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True))
    else:
        left = convert_activations(a, A_KIND, STATIC, dtype)
        return tl.dot(left, convert_entries(b, B_KIND, dtype), input_precision="ieee")


@triton.jit
def tile_int8(
    x, x_scale, x_row, x_inside, w, w_scale, n, n_inside, first, last,
    K: tl.constexpr, W_ROW: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`matmul_tile` of int8 with a scale per row on either side: summed in int32 and scaled once at the end. At most
    `MAX_INT32_COLUMNS` columns.
    """
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
def tile_stepwise(
    x, x_scale, x_row, x_inside, w, w_scale, w_zero, n, n_inside, first, last,
    K: tl.constexpr, W_ROW: tl.constexpr, X_ROW_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    A_KIND: tl.constexpr, X_GROUP: tl.constexpr, B_KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, FP8_DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """`matmul_tile` of all other forms: each loop iteration's float32 sums are scaled before they are added up."""
    KIND: tl.constexpr = 1 if A_KIND == 4 else A_KIND
    STATIC: tl.constexpr = X_ROW_SCALES == 0
    HALF: tl.constexpr = BK // 2 if B_KIND >= 3 else BK
    within = tl.arange(0, HALF)
    acc = tl.zeros([BM, BN], tl.float32)
    source, weight = x + x_row[:, None] * K, w + n.to(tl.int64)[None, :] * W_ROW
    if A_KIND == 4 and X_ROW_SCALES == 0:
        static_scale = tl.zeros([BM], tl.float32) + tl.load(x_scale)
    for k in range(first, last, BK):
        column = k + within
        if B_KIND >= 3:
            both = tl.load(weight + (k // 2 + within)[:, None], mask=n_inside[None, :], other=0)
            a = tl.load(source + column[None, :], mask=x_inside[:, None] & (column < K)[None, :], other=0.0)
            column += HALF
            c = tl.load(source + column[None, :], mask=x_inside[:, None] & (column < K)[None, :], other=0.0)
            WIDE: tl.constexpr = tl.float32 if B_KIND >= 4 else dtype
            low, high = convert_entries(both, B_KIND, WIDE), convert_entries(both >> 4, B_KIND, WIDE)
            if ZERO:
                zero = tl.load(w_zero + n // ROWS * GROUPS + (k // GROUP if GROUP > 0 else 0), mask=n_inside, other=0.0)
                low, high = low - zero.to(dtype)[None, :], high - zero.to(dtype)[None, :]
            if B_KIND >= 4:
                scale = w_scale + n * GROUPS + k // GROUP
                low = scale_entries(low, tl.load(scale, mask=n_inside, other=0), B_KIND, dtype)
            part = tl.dot(convert_activations(a, A_KIND, STATIC, dtype), low, input_precision="ieee")
            if B_KIND >= 4:
                high = scale_entries(high, tl.load(scale + 1, mask=n_inside & (k + HALF < K), other=0), B_KIND, dtype)
            part = tl.dot(convert_activations(c, A_KIND, STATIC, dtype), high, part, input_precision="ieee")
        else:
            inside = column < K
            a = tl.load(source + column[None, :], mask=x_inside[:, None] & inside[None, :], other=0.0)
            b = tl.load(weight + column[:, None], mask=n_inside[None, :] & inside[:, None], other=0.0)
            if ZERO:
                zero = tl.load(w_zero + n // ROWS * GROUPS + (k // GROUP if GROUP > 0 else 0), mask=n_inside, other=0.0)
                left = convert_entries(b, B_KIND, tl.float32) - zero[None, :]
                part = tl.dot(convert_activations(a, A_KIND, STATIC, dtype), left.to(dtype), input_precision="ieee")
            elif A_KIND == 4 and X_ROW_SCALES == 0:
                quantized = quantize_entries(a.to(tl.float32), static_scale[:, None], True, True)
                part = multiply_tiles(quantized, b, KIND, B_KIND, STATIC, FP8_DOT, dtype)
            elif A_KIND == 4:
                h = a.to(tl.float32)  # with FP8_DOT its entries keep NaN: a scale that does makes registers spill
                amax = tl.max(tl.abs(h), 1) if FP8_DOT else largest_magnitude(h, 1)
                row_scale = quant_scale(amax, 448.0, False)
                quantized = quantize_entries(h, row_scale[:, None], True, FP8_DOT)
                part = multiply_tiles(quantized, b, KIND, B_KIND, STATIC, FP8_DOT, dtype) * row_scale[:, None]
            else:
                part = multiply_tiles(a, b, A_KIND, B_KIND, STATIC, FP8_DOT, dtype)
        if GROUP > 0 and B_KIND < 4:
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
def tile_one_matrix(
    x, x_scale, x_row, x_inside, w, w_scale, w_zero, n, n_inside, first, last,
    K: tl.constexpr, W_ROW: tl.constexpr, X_ROW_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    A_KIND: tl.constexpr, X_GROUP: tl.constexpr, B_KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, FP8_DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """`matmul_tile` without GATED: calls the loop that suits the forms of the two operands."""
    if FP8_DOT and B_KIND == 3 and (A_KIND == 1 or A_KIND == 4):
        return tile_fp8_int4(
            x, x_scale, x_row, x_inside, w, w_scale, n, n_inside, 0, first, last, K, W_ROW, X_ROW_SCALES, GROUPS,
            A_KIND == 4, X_GROUP, ROWS, GROUP, BM, BN, BK, 0,
        )  # fmt: skip
    elif A_KIND == 2 and B_KIND == 2 and X_GROUP == 0 and GROUP == 0 and not ZERO and K <= MAX_INT32_COLUMNS:
        return tile_int8(
            x, x_scale, x_row, x_inside, w, w_scale, n, n_inside, first, last, K, W_ROW, GROUPS, ROWS, BM, BN, BK,
        )  # fmt: skip
    else:
        return tile_stepwise(
            x, x_scale, x_row, x_inside, w, w_scale, w_zero, n, n_inside, first, last, K, W_ROW, X_ROW_SCALES, GROUPS,
            A_KIND, X_GROUP, B_KIND, ROWS, GROUP, ZERO, FP8_DOT, BM, BN, BK, dtype,
        )  # fmt: skip


@triton.jit
def matmul_tile(
    x, x_scale, x_row, x_inside, w, w_scale, w_zero, n, n_inside, outputs, first, last,
    K: tl.constexpr, W_ROW: tl.constexpr, X_ROW_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    A_KIND: tl.constexpr, X_GROUP: tl.constexpr, B_KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, FP8_DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    dtype: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One tile of a product over columns `first` to `last` (without) of K: returns float32 `[BM, BN]` with all scales
    applied; stores nothing.

    `x_row` are the rows of `x` `[., K]`, `n` those of the weight; rows that are not `x_inside`, `n_inside` count as 0.
    A_KIND, B_KIND: forms of activations and weight (`convert_entries`); A_KIND 4: rows are plain and quantized to FP8
    here, with a scale per BK columns, or by the one scale in `x_scale` if X_ROW_SCALES is 0. X_GROUP, GROUP: columns
    that share a scale, 0 for a row; ROWS: weight rows that share one. FP8_DOT: the device multiplies FP8 numbers.
    GATED > 0: activation function of this number of this tile, times the tile of weight rows n + outputs.
    """
    if GATED > 0 and BM <= MAX_FUSED_GATE_ROWS and FP8_DOT and B_KIND == 3 and (A_KIND == 1 or A_KIND == 4):
        return tile_fp8_int4(
            x, x_scale, x_row, x_inside, w, w_scale, n, n_inside, outputs, first, last, K, W_ROW, X_ROW_SCALES, GROUPS,
            A_KIND == 4, X_GROUP, ROWS, GROUP, BM, BN, BK, GATED,
        )  # fmt: skip
    else:
        acc = tile_one_matrix(
            x, x_scale, x_row, x_inside, w, w_scale, w_zero, n, n_inside, first, last, K, W_ROW, X_ROW_SCALES, GROUPS,
            A_KIND, X_GROUP, B_KIND, ROWS, GROUP, ZERO, FP8_DOT, BM, BN, BK, dtype,
        )  # fmt: skip
        if GATED > 0:
            up = tile_one_matrix(
                x, x_scale, x_row, x_inside, w, w_scale, w_zero, n + outputs, n_inside, first, last, K, W_ROW,
                X_ROW_SCALES, GROUPS, A_KIND, X_GROUP, B_KIND, ROWS, GROUP, ZERO, FP8_DOT, BM, BN, BK, dtype,
            )  # fmt: skip
            acc = activate(acc, GATED) * up
        return acc


@triton.jit
def prefetch_weight_rows(w, n, first, last, W_ROW: tl.constexpr, B_KIND: tl.constexpr, FETCH: tl.constexpr):
    """Prefetch columns `first` to `last` of weight rows `n` into the L2 cache, at most FETCH bytes of each row."""
    row = w + n.to(tl.int64) * W_ROW
    if B_KIND >= 3:
        prefetch_l2(row + first // 2, tl.minimum((last - first) // 2, FETCH))
    else:
        prefetch_l2(row + first, tl.minimum((last - first) * (w.dtype.element_ty.primitive_bitwidth // 8), FETCH))


@triton.jit
def _product(
    x, x_scale, w, w_scale, w_zero, bias, out, parts, counters, rows, outputs,
    K: tl.constexpr, W_ROW: tl.constexpr, X_ROW_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    A_KIND: tl.constexpr, X_GROUP: tl.constexpr, B_KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, FP8_DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    dtype: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, PART: tl.constexpr, GATED: tl.constexpr,
    RASTER: tl.constexpr, FETCH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program `(tile of the result, part of K)` stores its tile in `out`; with SPLITS > 1 its part in `parts`, and the
    last program of a tile adds them up. GATED: as in `matmul_tile`, the outputs' halves are gate and up. FETCH: bytes
    of each weight row to prefetch before waiting for the launch in front (dependent launch).
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
        prefetch_weight_rows(w, row, first, last, W_ROW, B_KIND, FETCH)
        if GATED > 0:
            prefetch_weight_rows(w, row + outputs, first, last, W_ROW, B_KIND, FETCH)
    wait_for_previous(AHEAD)
    acc = matmul_tile(
        x, x_scale, x_row, x_inside, w, w_scale, w_zero, n, n_inside, outputs, first, last, K, W_ROW, X_ROW_SCALES,
        GROUPS, A_KIND, X_GROUP, B_KIND, ROWS, GROUP, ZERO, FP8_DOT, BM, BN, BK, dtype, GATED,
    )  # fmt: skip
    allow_next(AHEAD)
    inside = x_inside[:, None] & n_inside[None, :]
    if SPLITS > 1:
        mine = (tl.program_id(1) * rows + x_row)[:, None] * outputs + n[None, :]
        tl.store(parts + mine, acc, mask=inside)
        if not is_last_arrival(counters + tl.program_id(0), SPLITS):
            return
        acc = tl.zeros([BM, BN], tl.float32)
        for part in range(SPLITS):
            acc += load_shared_part(parts + (part * rows + x_row)[:, None] * outputs + n[None, :], inside)
    if BIAS:
        acc += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + x_row[:, None] * outputs + n[None, :], acc.to(out.dtype.element_ty), mask=inside)


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MAX_PREFETCH_ROWS = 64
"""Up to this many rows of activations, one program reads each tile of the weight, and may prefetch it."""
PREFETCH_BYTES_PER_ROW = 1024
"""Prefetched of each weight row: a few loop iterations, and for all running programs no more than the cache holds."""
FLOAT32_DEPTH = 32
"""Columns per loop iteration of float32 entries: what fits into shared memory."""


def tile_constants(x: MatmulInput, weight: PackedWeight, fp8: bool) -> dict[str, object]:
    """The compile-time constants of `matmul_tile` that follow from the operands' formats.

    Args:
        x: left operand.
        weight: right operand.
        fp8: the device multiplies FP8 numbers.
    """
    depth = weight.depth
    if weight.kind in (PLAIN, INT8) and not weight.group and not x.group and x.dtype == torch.float32:
        depth = FLOAT32_DEPTH
    return {
        "K": weight.columns, "W_ROW": weight.data.stride(-2), "A_KIND": x.kind, "B_KIND": weight.kind,
        "X_ROW_SCALES": x.row_scales, "X_GROUP": x.group, "ROWS": weight.rows,
        "GROUPS": 1 if weight.scale is None else weight.scale.shape[-1], "GROUP": weight.group,
        "ZERO": weight.zero is not None, "FP8_DOT": fp8 and (weight.kind < INT4 or is_multiplied_in_fp8(weight)),
        "BK": depth,
        "dtype": tl.bfloat16 if x.kind != PLAIN and x.dtype == torch.float32 else DTYPES[x.dtype],
    }  # fmt: skip


def matmul(
    x: MatmulInput,
    weight: PackedWeight,
    products: Products,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    gate: str = "",
) -> torch.Tensor:
    """`x weight^T + bias`, `[M, N]`; or `[M, N / 2]`: `gate` of its first half times its second.

    Where the tiles alone would not fill the device, K is split among programs, and the last program of a tile adds the
    parts up (`split_reduction.py`).

    Args:
        x: `[M, K]`; its scales' groups are whole rows or the weight's.
        weight: `[N, K]`.
        products: tile sizes.
        bias: `[N]`, or None.
        out_dtype: of the result; by default the activations'.
        gate: an activation function of `FUNCTIONS`; the weight holds gate and up, one above the other.
    """
    rows = x.data.shape[0]
    outputs = weight.outputs // 2 if gate else weight.outputs
    out = torch.empty(rows, outputs, device=x.data.device, dtype=out_dtype or x.dtype)
    if not rows:
        return out
    chosen = products.choose_for_experts(rows) if gate else products.choose(rows)
    constants = tile_constants(x, weight, products.fp8)
    depth = weight.depth
    splits = 1 if gate else products.splits(chosen, rows, outputs, weight.columns)
    part = triton.cdiv(triton.cdiv(weight.columns, splits), depth) * depth
    splits = triton.cdiv(weight.columns, part)
    parts = out if splits == 1 else torch.empty(splits, rows, outputs, device=out.device)
    tiles = triton.cdiv(rows, chosen.rows) * triton.cdiv(outputs, chosen.columns)
    counters = out if splits == 1 else products.counters.of(out.device, tiles)
    scale = lambda s: out if s is None else s  # noqa: E731 - what is not there is not read
    fetch = PREFETCH_BYTES_PER_ROW if products.ahead and rows <= MAX_PREFETCH_ROWS else 0
    _product[(tiles, splits)](
        x.data, scale(x.scale), weight.data, scale(weight.scale), scale(weight.zero), scale(bias), out, parts, counters,
        rows, outputs, **constants, BM=chosen.rows, BN=chosen.columns, BIAS=bias is not None, SPLITS=splits, PART=part,
        GATED=FUNCTIONS[gate] if gate else 0, RASTER=RASTER, FETCH=fetch,
        num_warps=chosen.warps, num_stages=chosen.stages, **launch_options(products.ahead),
    )  # fmt: skip
    return out
