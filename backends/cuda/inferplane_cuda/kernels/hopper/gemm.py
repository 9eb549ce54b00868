"""FP8 products on Hopper: rows with a scale per 128 columns, times a weight with a scale per block of 128 x 128.

A program has a tile of 128 rows and up to 128 columns. One warp loads 128 columns of K at a time, a ring of stages
ahead; two groups of four warps take 64 rows each. The tensor core sums 128 columns by itself; that sum is scaled and
added in float32, since its own is short. While one group adds, the other one's product runs.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2, for the scales and for promoting sums every 128 columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from inferplane_cuda.kernels.hopper.barriers import make_barriers
from inferplane_cuda.kernels.hopper.gluon_compat import load_tile


@gluon.jit
def load_tiles(
    x, w, row, column, k_steps, x_tiles, w_tiles, ready, free, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The loading warp: tiles of `x` and `w`, 128 columns of K at a time, into a ring of STAGES buffers."""
    for i in range(0, k_steps):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), (128 + COLUMNS) * 128)
        load_tile(x, [row, i * 128], ready.index(stage), x_tiles.index(stage))
        load_tile(w, [column, i * 128], ready.index(stage), w_tiles.index(stage))


@gluon.jit
def sum_scaled_products(
    scales, block, k_steps, x_tiles, w_tiles, ready, free,
    GROUP: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The product of a group's 64 rows, scaled every 128 columns and summed in float32.

    `scales` and `block` point to the first scale of each row, and of the weight's block.
    """
    acc = gl.zeros([64, COLUMNS], gl.float32, MMA)
    for i in range(0, k_steps):
        stage = i % STAGES
        scale = gl.load(scales + i) * gl.load(block + i)
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        mine = x_tiles.index(stage).slice(GROUP * 64, 64, dim=0)
        part = gl.zeros([64, COLUMNS], gl.float32, MMA)
        part = warpgroup_mma(mine, w_tiles.index(stage).permute((1, 0)), part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(free.index(stage), count=1)
        acc = acc + part * scale[:, None]
    return acc


@gluon.jit
def store_rows(out, acc, row, column, end, columns, COLUMNS: gl.constexpr):
    """Store 64 rows of a result from `row` on, those before `end`, in bfloat16."""
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    result = gl.convert_layout(acc.to(gl.bfloat16), STORE)
    down = row + gl.arange(0, 64, gl.SliceLayout(1, STORE))
    across = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, STORE))
    inside = (down < end)[:, None] & (across < columns)[None, :]
    gl.store(out + down.to(gl.int64)[:, None] * columns + across[None, :], result, mask=inside)


@gluon.jit
def compute_half_tile(
    x_scale, w_scale, out, row, column, rows, columns, k_steps, x_tiles, w_tiles, ready, free,
    GROUP: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One group of four warps: rows `64 GROUP` to `64 GROUP + 63` of the tile."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    m = row + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    scales, block = x_scale + gl.minimum(m, rows - 1) * k_steps, w_scale + column // 128 * k_steps
    acc = sum_scaled_products(scales, block, k_steps, x_tiles, w_tiles, ready, free, GROUP, COLUMNS, STAGES, MMA)
    store_rows(out, acc, row + GROUP * 64, column, rows, columns, COLUMNS)


@gluon.jit
def product(
    x, w, x_scale, w_scale, out, rows, columns, k_steps,
    COLUMNS: gl.constexpr, RASTER: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One program per tile; RASTER tiles of rows run side by side, so that they find the weight in the cache."""
    down, across = gl.cdiv(rows, 128), gl.cdiv(columns, COLUMNS)
    band = RASTER * across
    first = gl.program_id(0) // band * RASTER
    high = gl.minimum(down - first, RASTER)
    row = (first + gl.program_id(0) % band % high) * 128
    column = gl.program_id(0) % band // high * COLUMNS
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], TILE)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, 128], TILE)
    ready, free = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (
                compute_half_tile,
                (
                    x_scale, w_scale, out, row, column, rows, columns, k_steps, x_tiles, w_tiles, ready, free,
                    0, COLUMNS, STAGES,
                ),
            ),
            (
                compute_half_tile,
                (
                    x_scale, w_scale, out, row, column, rows, columns, k_steps, x_tiles, w_tiles, ready, free,
                    1, COLUMNS, STAGES,
                ),
            ),
            (load_tiles, (x, w, row, column, k_steps, x_tiles, w_tiles, ready, free, COLUMNS, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
