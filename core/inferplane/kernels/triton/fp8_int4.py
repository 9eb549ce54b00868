"""INT4 weights under activations in FP8, multiplied as FP8 numbers: what the entries -8 to 7 are, exactly.

The tile is held with the weight's rows first. So the expanded weight is the factor that matrix units read from
registers, where it was expanded, and few tokens are the narrow side, which may be 16 wide, and not the side of 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferplane.kernels.triton.rowwise import encoded, scale_of, silu
from inferplane.kernels.triton.weight_packing import INT4, Packed

LEAST_DEPTH = 64
"""Columns a loop turn: half of them, those of the low or of the high bits, are an FP8 product's 32 at least."""
TOGETHER = tl.constexpr(32)
"""Rows up to which both halves of a gated product are held at once, so that activations are read and coded once."""


def in_fp8(weight: Packed) -> bool:
    """Whether these entries are FP8 numbers and lie as `tile` reads them."""
    return weight.kind == INT4 and weight.zero is None and weight.depth >= LEAST_DEPTH


@triton.jit
def eighths(x):
    """An entry offset by 8 in the low bits -> the FP8 number that is 2^-9 times the entry. Up to 2^-5, e4m3 has its
    numbers 2^-9 apart, so the bits of those are the entry itself, with its sign in the highest.
    """
    n = x & 15
    return tl.minimum(n - 8, 136 - n).to(tl.float8e4nv, bitcast=True)  # 8 - n below 8 is beyond 248


@triton.jit
def tile(
    x, x_scale, x_row, x_inside, w, w_scale, n, n_inside, outputs, first, last,
    K: tl.constexpr, W_ROW: tl.constexpr, X_ROW_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    CODE: tl.constexpr, X_GROUP: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """As `product.tile`, `[BM, BN]`: of FP8 codes, or with CODE of plain rows, coded here by BK columns. GATED: rows n
    and n + outputs of the weight meet the activations in the same turn.
    """
    HALF: tl.constexpr = BK // 2
    within = tl.arange(0, HALF)
    acc = tl.zeros([BN, BM], tl.float32)
    up = acc
    source, weight = x + x_row[None, :] * K, w + n.to(tl.int64)[:, None] * W_ROW
    scales = w_scale + n // ROWS * GROUPS
    if GATED:
        up_weight, up_scales = weight + outputs.to(tl.int64) * W_ROW, w_scale + (n + outputs) // ROWS * GROUPS
    for k in range(first, last, BK):
        column = k + within
        both = tl.load(weight + (k // 2 + within)[None, :], mask=n_inside[:, None], other=0)
        a = tl.load(source + column[:, None], mask=x_inside[None, :] & (column < K)[:, None], other=0.0)
        column += HALF
        c = tl.load(source + column[:, None], mask=x_inside[None, :] & (column < K)[:, None], other=0.0)
        if CODE:
            a, c = a.to(tl.float32), c.to(tl.float32)
            scale = scale_of(tl.maximum(tl.max(tl.abs(a), 0), tl.max(tl.abs(c), 0)), 448.0, False)
            a, c = encoded(a, scale[None, :], True), encoded(c, scale[None, :], True)
        elif X_GROUP > 0:
            scale = tl.load(x_scale + x_row * X_ROW_SCALES + k // X_GROUP, mask=x_inside, other=0.0)
        else:
            scale = tl.full([BM], 1.0, tl.float32)
        a, c = a.to(tl.float8e4nv, bitcast=True), c.to(tl.float8e4nv, bitcast=True)
        part = tl.dot(eighths(both >> 4), c, tl.dot(eighths(both), a)) * scale[None, :]
        if GROUP > 0:
            part *= tl.load(scales + k // GROUP, mask=n_inside, other=0.0)[:, None]
        acc += part
        if GATED:
            both = tl.load(up_weight + (k // 2 + within)[None, :], mask=n_inside[:, None], other=0)
            part = tl.dot(eighths(both >> 4), c, tl.dot(eighths(both), a)) * scale[None, :]
            if GROUP > 0:
                part *= tl.load(up_scales + k // GROUP, mask=n_inside, other=0.0)[:, None]
            up += part
    if GROUP == 0:
        acc *= tl.load(scales, mask=n_inside, other=0.0)[:, None]
        if GATED:
            up *= tl.load(up_scales, mask=n_inside, other=0.0)[:, None]
    if not CODE and X_GROUP == 0:
        scale = tl.load(x_scale + x_row * X_ROW_SCALES, mask=x_inside, other=0.0)
        acc *= scale[None, :]
        if GATED:
            up *= scale[None, :]
    acc *= 512.0
    if GATED:
        acc = silu(acc) * (up * 512.0)
    return tl.trans(acc)
