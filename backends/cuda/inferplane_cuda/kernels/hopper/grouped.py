"""FP8 products by experts on Hopper: blocks of 128 rows, each with its expert's matrix, as `gemm` multiplies them.

Rows lie by slots, an expert's side by side and filled up to whole blocks: in the contiguous form as they were dealt, in
the masked form so many an expert. Which expert a block has is read on the device; blocks without one end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from inferplane_cuda.kernels.hopper.barriers import barriers
from inferplane_cuda.kernels.hopper.gemm import load, store_rows, sums


@gluon.jit
def compute(
    x_scale, w_scale, out, slots, weights, row, column, end, pairs, columns, turns, steps, x_tiles, w_tiles, ready,
    free, GROUP: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """One group of four warps: 64 rows of the block, those before `end`. WEIGHTED: to their pairs, times their weights,
    in float32; else to their slots, in bfloat16.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    m = row + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    block = w_scale + column // 128 * turns
    acc = sums(x_scale + m * turns, block, steps, x_tiles, w_tiles, ready, free, GROUP, COLUMNS, STAGES, MMA)
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
    x, w, x_scale, w_scale, out, slots, owners, weights, blocks, pairs, columns, turns, scale_step,
    COLUMNS: gl.constexpr, RASTER: gl.constexpr, STAGES: gl.constexpr, WEIGHTED: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """One program a block and COLUMNS columns; RASTER blocks are done side by side, which mostly have one expert."""
    across = gl.cdiv(columns, COLUMNS)
    band = RASTER * across
    first = gl.program_id(0) // band * RASTER
    high = gl.minimum(blocks - first, RASTER)
    place = first + gl.program_id(0) % band % high
    row, column = place * 128, gl.program_id(0) % band // high * COLUMNS
    expert = gl.load(owners + place)
    here = (expert >= 0).to(gl.int32)
    steps, end = turns * here, row + 128 * here
    w_scale += expert.to(gl.int64) * scale_step
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], TILE)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, 128], TILE)
    ready, free = barriers(STAGES, 1), barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (
                compute,
                (
                    x_scale, w_scale, out, slots, weights, row, column, end, pairs, columns, turns, steps, x_tiles,
                    w_tiles, ready, free, 0, COLUMNS, STAGES, WEIGHTED,
                ),
            ),
            (
                compute,
                (
                    x_scale, w_scale, out, slots, weights, row, column, end, pairs, columns, turns, steps, x_tiles,
                    w_tiles, ready, free, 1, COLUMNS, STAGES, WEIGHTED,
                ),
            ),
            (load, (x, w, row, expert * columns + column, steps, x_tiles, w_tiles, ready, free, COLUMNS, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@triton.jit
def spread(
    x, x_scale, slots, owners, out, out_scale, pairs,
    K: tl.constexpr, GROUPS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Program `slot`: the codes and scales of its pair's token. Slots that nobody has are left as they are."""
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
        codes = tl.load(x + token * K + column, mask=column < K, other=0)
        tl.store(out + slot * K + column, codes, mask=column < K)
