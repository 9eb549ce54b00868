"""INT4 weights times activations in FP8, multiplied as FP8 numbers, which the entries -8 to 7 are exactly.

The tile has the weight's rows first. So the converted weight is the operand that matrix units read from registers,
where it was converted, and few tokens are the narrow operand, which may have 16 rows instead of 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferplane.kernels.triton.activations import activate
from inferplane.kernels.triton.rowwise import larger_or_nan, largest_magnitude, quant_scale, quantize_entries
from inferplane.kernels.triton.weight_packing import INT4, PackedWeight

MIN_DEPTH = 64
"""Fewest columns per loop iteration: half of them (the low, or the high bits) are one FP8 product, which takes 32."""
MAX_FUSED_GATE_ROWS = tl.constexpr(32)
"""Up to this many rows, a program computes gate and up together, so that activations are read and quantized once."""


def is_multiplied_in_fp8(weight: PackedWeight) -> bool:
    """Whether `tile_fp8_int4` can multiply this weight with activations in FP8: INT4 without zero points, at least 64
    columns per scale. Other INT4 weights are multiplied in 16 bits.
    """
    return weight.kind == INT4 and weight.zero is None and weight.depth >= MIN_DEPTH


@triton.jit
def int4_to_fp8(x):
    """INT4 entries as FP8 numbers, times 2^-9. `x` holds an entry plus 8 in its low four bits.

    FP8 (e4m3) numbers up to 2^-5 are 2^-9 apart, so their bits are the entry itself, with its sign in the highest bit.
    """
    n = x & 15
    return tl.minimum(n - 8, 136 - n).to(tl.float8e4nv, bitcast=True)  # 8 - n below 8 is beyond 248


@triton.jit
def tile_fp8_int4(
    x, x_scale, x_row, x_inside, w, w_scale, n, n_inside, outputs, first, last,
    K: tl.constexpr, W_ROW: tl.constexpr, X_ROW_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    QUANTIZE: tl.constexpr, X_GROUP: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """`matmul_tile` of FP8 activations and INT4 weights: float32 `[BM, BN]`.

    QUANTIZE: activations are plain and quantized here by BK columns. GATED: as in `matmul_tile`; weight rows n
    and n + outputs are multiplied in the same loop iteration.
    """
    HALF: tl.constexpr = BK // 2
    within = tl.arange(0, HALF)
    acc = tl.zeros([BN, BM], tl.float32)
    up = acc
    source, weight = x + x_row[None, :] * K, w + n.to(tl.int64)[:, None] * W_ROW
    scales = w_scale + n // ROWS * GROUPS
    if GATED > 0:
        up_weight, up_scales = weight + outputs.to(tl.int64) * W_ROW, w_scale + (n + outputs) // ROWS * GROUPS
    for k in range(first, last, BK):
        column = k + within
        both = tl.load(weight + (k // 2 + within)[None, :], mask=n_inside[:, None], other=0)
        a = tl.load(source + column[:, None], mask=x_inside[None, :] & (column < K)[:, None], other=0.0)
        column += HALF
        c = tl.load(source + column[:, None], mask=x_inside[None, :] & (column < K)[:, None], other=0.0)
        if QUANTIZE:
            a, c = a.to(tl.float32), c.to(tl.float32)
            scale = quant_scale(larger_or_nan(largest_magnitude(a, 0), largest_magnitude(c, 0)), 448.0, False)
            a, c = quantize_entries(a, scale[None, :], True), quantize_entries(c, scale[None, :], True)
        elif X_GROUP > 0:
            scale = tl.load(x_scale + x_row * X_ROW_SCALES + k // X_GROUP, mask=x_inside, other=0.0)
        else:
            scale = tl.full([BM], 1.0, tl.float32)
        a, c = a.to(tl.float8e4nv, bitcast=True), c.to(tl.float8e4nv, bitcast=True)
        part = tl.dot(int4_to_fp8(both >> 4), c, tl.dot(int4_to_fp8(both), a)) * scale[None, :]
        if GROUP > 0:
            part *= tl.load(scales + k // GROUP, mask=n_inside, other=0.0)[:, None]
        acc += part
        if GATED > 0:
            both = tl.load(up_weight + (k // 2 + within)[None, :], mask=n_inside[:, None], other=0)
            part = tl.dot(int4_to_fp8(both >> 4), c, tl.dot(int4_to_fp8(both), a)) * scale[None, :]
            if GROUP > 0:
                part *= tl.load(up_scales + k // GROUP, mask=n_inside, other=0.0)[:, None]
            up += part
    if GROUP == 0:
        acc *= tl.load(scales, mask=n_inside, other=0.0)[:, None]
        if GATED > 0:
            up *= tl.load(up_scales, mask=n_inside, other=0.0)[:, None]
    if not QUANTIZE and X_GROUP == 0:
        scale = tl.load(x_scale + x_row * X_ROW_SCALES, mask=x_inside, other=0.0)
        acc *= scale[None, :]
        if GATED > 0:
            up *= scale[None, :]
    acc *= 512.0
    if GATED > 0:
        acc = activate(acc, GATED) * (up * 512.0)
    return tl.trans(acc)
