"""Latent attention as in `mla`, with FP8 products over latents that have one scale per token: half the bytes, and
products at twice the rate.

Queries have one scale a row, rotated entries stay bfloat16. A token's scale, a power of two, is added to its score's
exponent, so that weights stay within [0, 1] whatever the scales, and is divided out of the sum of weights again. Values
are transposed in shared memory, since FP8 products read the summed index contiguously on both sides. Sums are promoted
to float32 after each block, since FP8 products alone do not add in full float32.

Source: SnapMLA, arXiv 2602.10718, for what is kept in which format; DeepSeek-V3, arXiv 2412.19437, section 3.3.2, for
promoting.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from inferplane_cuda.kernels.hopper import unit_results as work
from inferplane_cuda.kernels.hopper.barriers import key_limits
from inferplane_cuda.kernels.hopper.gluon_compat import as_fp8, barrier, exponent_of, first_tile, opaque, power_of_two
from inferplane_cuda.kernels.hopper.mla import load_blocks
from inferplane_cuda.kernels.hopper.softmax import UNSEEN, zero_rows_from

WEIGHT_SCALE = gl.constexpr(256.0)
"""Factor of weights before they become FP8, whose largest number is 448."""


@gluon.jit
def transpose_values(raw, transposed, layout: gl.constexpr):
    """Transpose values in shared memory: `raw` `[64, 512]` into `transposed` `[512, 64]`."""
    for part in gl.static_range(4):
        x = raw.slice(part * 128, 128, dim=1).load(layout)
        transposed.slice(part * 128, 128, dim=0).permute((1, 0)).store(x)


@gluon.jit
def add_weighted_quarter(acc, shrink, weights, values, QUARTER: gl.constexpr, RESULT: gl.constexpr):
    """Shrink a quarter of the result's columns, and add this block's weighted sum of values to it in float32."""
    more = gl.zeros([64, 128], gl.float32, RESULT)
    quarter = values.slice(QUARTER * 128, 128, dim=0).permute((1, 0))
    more = warpgroup_mma(weights, quarter, more, use_acc=False, is_async=True)
    return acc * shrink + warpgroup_mma_wait(0, deps=(more,))


@gluon.jit
def compute_units(
    scales, q_scales, scale, out, parts, masses, tables, table_outer, starts, lengths, tiles,
    q_tiles, rope_tile, p_tile, transposed, raws, ropes, q_ready, q_free, ready, free,
    program_part,
    HEADS: gl.constexpr, STAGES: gl.constexpr, OVERHEAD: gl.constexpr, SCORES: gl.constexpr, SCORES_8: gl.constexpr,
    RESULT: gl.constexpr, TILE_8: gl.constexpr, TRANSPOSED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The eight computing warps: attention of this program's units, block by block."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES_8)
    ZERO: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [num_warps, 1], [1, 0])
    TRANSPOSE: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [4, num_warps // 4], [1, 0])
    within = gl.arange(0, 64, gl.SliceLayout(0, SCORES_8))
    row = gl.arange(0, 64, ROW)
    token = gl.arange(0, 64, gl.BlockedLayout([1], [32], [num_warps], [0]))
    unit = work.load_program_part(program_part, work.FIRST_UNIT, num_warps)
    begin = work.load_program_part(program_part, work.BEGIN, num_warps)
    step = unit * 0
    used = unit * 0
    values = as_fp8(transposed, 512, 64, TRANSPOSED)
    while unit < work.load_program_part(program_part, work.END_UNIT, num_warps):
        sequence, tile, blocks, begin_block, end_block = work.load_unit_share(
            program_part, unit, begin, starts, lengths, tiles, HEADS, OVERHEAD, num_warps
        )  # fmt: skip
        if begin_block < end_block:
            limit, length = key_limits(starts, lengths, sequence, tile, row, HEADS)
            begin_row = gl.load(starts + sequence)
            real = tile * 64 + row < (gl.load(starts + sequence + 1) - begin_row) * HEADS
            q_scale = gl.load(q_scales + begin_row * HEADS + tile * 64 + row, mask=real, other=0.0) * scale
            mbarrier.wait(q_ready, used & 1)
            used += 1
            highest = gl.full([64], UNSEEN, gl.float32, ROW)
            total = gl.zeros([64], gl.float32, ROW)
            first = gl.zeros([64, 128], gl.float32, RESULT)
            second = gl.zeros([64, 128], gl.float32, RESULT)
            third = gl.zeros([64, 128], gl.float32, RESULT)
            fourth = gl.zeros([64, 128], gl.float32, RESULT)
            for i in range(begin_block, end_block):
                stage = step % STAGES
                known = length - i * 64
                slot = gl.load(tables + sequence * table_outer + i) * 64 + token
                key_scale = gl.load(scales + slot, mask=token < known, other=1.0)
                key_scale = gl.convert_layout(key_scale, gl.SliceLayout(0, SCORES_8))
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                barrier()  # the other warpgroup no longer reads the previous values
                raw = raws.index(stage)
                if known < 64:
                    zero_rows_from(raw, known, ZERO, 64, 512)
                    barrier()
                transpose_values(raw, transposed, TRANSPOSE)
                keys = as_fp8(raw, 64, 512, TILE_8)
                s = gl.zeros([64, 64], gl.float32, SCORES_8)
                queries = as_fp8(first_tile(q_tiles, step), 64, 512, TILE_8)
                s = warpgroup_mma(queries, keys.permute((1, 0)), s, use_acc=False, is_async=True)
                r = gl.zeros([64, 64], gl.float32, SCORES)
                r = warpgroup_mma(rope_tile, ropes.index(stage).permute((1, 0)), r, use_acc=False, is_async=True)
                s, r = warpgroup_mma_wait(0, deps=(s, r))
                mbarrier.arrive(free.index(stage), count=1)
                exponents = exponent_of(key_scale)
                s = s * (q_scale[:, None] * key_scale[None, :]) + gl.convert_layout(r, SCORES_8) * scale
                seen = (opaque(i) * 64 + within)[None, :] < limit[:, None]
                s = gl.where(seen, s, UNSEEN) + exponents.to(gl.float32)[None, :]
                higher = gl.maximum(highest, gl.max(s, 1))
                shrink = gl.exp2(highest - higher)
                p = gl.exp2(s - higher[:, None])
                total = total * shrink + gl.sum(p * power_of_two(-exponents)[None, :], 1)
                highest = higher
                p_tile.store((p * WEIGHT_SCALE).to(gl.float8e4nv))
                fence_async_shared()
                shrink = gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
                barrier()
                first = add_weighted_quarter(first, shrink, p_tile, values, 0, RESULT)
                second = add_weighted_quarter(second, shrink, p_tile, values, 1, RESULT)
                third = add_weighted_quarter(third, shrink, p_tile, values, 2, RESULT)
                fourth = add_weighted_quarter(fourth, shrink, p_tile, values, 3, RESULT)
                step += 1
            mbarrier.arrive(q_free, count=1)
            work.store_unit_result(
                (first, second, third, fourth), highest, total * WEIGHT_SCALE, out, parts, masses, starts, lengths,
                tiles, program_part, unit, begin, HEADS, OVERHEAD, 128, SCORES_8, RESULT, num_warps,
            )  # fmt: skip
        begin += gl.where(blocks > 0, blocks + OVERHEAD, 0)
        unit += 1


@gluon.jit
def mla_decode_fp8_mma(
    q, q_rope, kv, kv_rope, q_scales, scales, tables, starts, lengths, out, parts, masses, arrived, scale, table_outer,
    units, tiles,
    HEADS: gl.constexpr, STAGES: gl.constexpr, BLOCK_UNITS: gl.constexpr, OVERHEAD: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """The kernel with FP8 products; the module describes it.

    `q` `[T H, 512]` and `kv` `[slots, 512]` are bits of FP8 numbers, `q_scales` `[T H]` and `scales` `[slots]` their
    scales; `q_rope` and `kv_rope` are bfloat16.
    """
    HALF: gl.constexpr = 64 // (num_warps // 4)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, HALF, 16])
    SCORES_8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, HALF, 32])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, 64, 32])
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    TILE_8: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    raws = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, 512], TILE_8)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE)
    transposed = gl.allocate_shared_memory(gl.uint8, [512, 64], TRANSPOSED)
    rope_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    q_tiles = gl.allocate_shared_memory(gl.uint8, [1, 64, 512], TILE_8)
    p_tile = gl.allocate_shared_memory(gl.float8e4nv, [64, 64], TRANSPOSED)
    ready, free, q_ready, q_free, first_unit, end_unit, begin, size, program_part = work.begin_step(
        starts, lengths, units, tiles, HEADS, BLOCK_UNITS, OVERHEAD, STAGES, num_warps
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                compute_units,
                (
                    scales, q_scales, scale, out, parts, masses, tables, table_outer, starts, lengths, tiles,
                    q_tiles, rope_tile, p_tile, transposed, raws, ropes, q_ready, q_free, ready, free,
                    program_part, HEADS, STAGES, OVERHEAD, SCORES, SCORES_8, RESULT, TILE_8, TRANSPOSED,
                    num_warps,
                ),
            ),
            (
                load_blocks,
                (
                    q, q_rope, kv, kv_rope, tables, table_outer, starts, lengths, tiles,
                    q_tiles.index(0), rope_tile, raws, ropes, q_ready, q_free, ready, free,
                    first_unit, end_unit, begin, size, HEADS, STAGES, OVERHEAD, 64 * 640, 64 * 640, 0,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
    work.combine_units(out, parts, masses, arrived, starts, lengths, tiles, program_part, HEADS, OVERHEAD, num_warps)
