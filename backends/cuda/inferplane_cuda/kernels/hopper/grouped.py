"""FP8 products by experts on Hopper: blocks of 128 rows, each with its expert's matrix, as `gemm` multiplies them.

Rows are slots, those of an expert side by side: in the contiguous form filled up to whole blocks, in the masked form
the same number for every expert. A block's expert is read on the device; blocks without one end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from inferplane_cuda.kernels.hopper.barriers import make_barriers
from inferplane_cuda.kernels.hopper.gemm import load_tiles, store_rows, sum_scaled_products


@gluon.jit
def compute_half_block(
    x_scale, w_scale, out, slots, weights, row, column, end, pairs, columns, k_steps, steps, x_tiles, w_tiles, ready,
    free, GROUP: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """One group of four warps: 64 rows of the block, those before `end`. WEIGHTED: to their pairs, times their weights,
    in float32; else to their slots, in bfloat16.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    m = row + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    block = w_scale + column // 128 * k_steps
    scales = x_scale + m * k_steps
    acc = sum_scaled_products(scales, block, steps, x_tiles, w_tiles, ready, free, GROUP, COLUMNS, STAGES, MMA)
    if WEIGHTED:
        pair = gl.load(slots + m, mask=m < end, other=pairs)
        real = pair < pairs
        acc = acc * gl.load(weights + pair, mask=real, other=0.0)[:, None]
        across = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))
        inside = real[:, None] & (across < columns)[None, :]
        gl.store(out + pair.to(gl.int64)[:, None] * columns + across[None, :], acc, mask=inside)
    else:
        store_rows(out, acc, row + GROUP * 64, column, end, columns, COLUMNS)


@gluon.jit
def product(
    x, w, x_scale, w_scale, out, slots, owners, weights, blocks, pairs, columns, k_steps, scale_step,
    COLUMNS: gl.constexpr, RASTER: gl.constexpr, STAGES: gl.constexpr, WEIGHTED: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """One program per block and COLUMNS columns; RASTER blocks run side by side, which mostly have the same expert."""
    across = gl.cdiv(columns, COLUMNS)
    band = RASTER * across
    first = gl.program_id(0) // band * RASTER
    high = gl.minimum(blocks - first, RASTER)
    place = first + gl.program_id(0) % band % high
    row, column = place * 128, gl.program_id(0) % band // high * COLUMNS
    expert = gl.load(owners + place)
    here = (expert >= 0).to(gl.int32)
    steps, end = k_steps * here, row + 128 * here
    w_scale += expert.to(gl.int64) * scale_step
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], TILE)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, 128], TILE)
    ready, free = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (
                compute_half_block,
                (
                    x_scale, w_scale, out, slots, weights, row, column, end, pairs, columns, k_steps, steps, x_tiles,
                    w_tiles, ready, free, 0, COLUMNS, STAGES, WEIGHTED,
                ),
            ),
            (
                compute_half_block,
                (
                    x_scale, w_scale, out, slots, weights, row, column, end, pairs, columns, k_steps, steps, x_tiles,
                    w_tiles, ready, free, 1, COLUMNS, STAGES, WEIGHTED,
                ),
            ),
            (load_tiles, (x, w, row, expert * columns + column, steps, x_tiles, w_tiles, ready, free, COLUMNS, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@triton.jit
def gather_pairs(
    x, x_scale, slots, owners, out, out_scale, pairs,
    K: tl.constexpr, GROUPS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Program `slot` copies the quantized row and the scales of its pair's token; empty slots are left unwritten."""
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(owners + slot // 128) < 0:
        return
    pair = tl.load(slots + slot)
    if pair >= pairs:
        return
    token = (pair // TOP_K).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    scale = tl.load(x_scale + token * GROUPS + group, mask=group < GROUPS, other=0.0)
    tl.store(out_scale + slot * GROUPS + group, scale, mask=group < GROUPS)
    for start in range(0, K, BLOCK):
        column = start + tl.arange(0, BLOCK)
        quantized = tl.load(x + token * K + column, mask=column < K, other=0)
        tl.store(out + slot * K + column, quantized, mask=column < K)
