"""The same with FP8 products over latents that have one scale a token: half the bytes, and products at twice the rate.

Queries have one scale a row, rotated entries stay bfloat16. A token's scale, a power of two, is added to its score's
exponent, so that weights stay within [0, 1] whatever the scales, and is taken out of the sum of weights again. Values
are turned in shared memory, since FP8 products want the summed index side by side on both sides. Products are promoted
to float32 after each block: FP8 products do not add in full float32 by themselves.

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

from inferplane_cuda.kernels.hopper.barriers import barriers, limits
from inferplane_cuda.kernels.hopper.gluon_compat import anew, as_fp8, barrier, exponent, only, power
from inferplane_cuda.kernels.hopper.mla import load
from inferplane_cuda.kernels.hopper.softmax import UNSEEN, wipe
from inferplane_cuda.kernels.hopper.unit_results import BEGIN, BEHIND, FIRST_UNIT, finish, note, noted, settle, share
from inferplane_cuda.kernels.hopper.work_split import part_of

WEIGHT = gl.constexpr(256.0)
"""What weights are multiplied by before they become FP8, whose largest number is 448."""


@gluon.jit
def turn_values(raw, turned, layout: gl.constexpr):
    """`raw` `[64, 512]` into `turned` `[512, 64]`."""
    for part in gl.static_range(4):
        x = raw.slice(part * 128, 128, dim=1).load(layout)
        turned.slice(part * 128, 128, dim=0).permute((1, 0)).store(x)


@gluon.jit
def promoted(acc, shrink, weights, values, QUARTER: gl.constexpr, RESULT: gl.constexpr):
    """A quarter of the columns of a result, shrunk, and this block's weighted sum added to it."""
    more = gl.zeros([64, 128], gl.float32, RESULT)
    quarter = values.slice(QUARTER * 128, 128, dim=0).permute((1, 0))
    more = warpgroup_mma(weights, quarter, more, use_acc=False, is_async=True)
    return acc * shrink + warpgroup_mma_wait(0, deps=(more,))


@gluon.jit
def compute(
    scales, q_scales, scale, out, parts, masses, tables, table_outer, starts, lengths, tiles,
    q_tiles, rope_tile, p_tile, turned, raws, ropes, q_ready, q_free, ready, free,
    notes,
    HEADS: gl.constexpr, STAGES: gl.constexpr, OVER: gl.constexpr, SCORES: gl.constexpr, SCORES_8: gl.constexpr,
    RESULT: gl.constexpr, TILE_8: gl.constexpr, TURNED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The eight computing warps."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES_8)
    WIPE: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [num_warps, 1], [1, 0])
    TURN: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [4, num_warps // 4], [1, 0])
    within = gl.arange(0, 64, gl.SliceLayout(0, SCORES_8))
    row = gl.arange(0, 64, ROW)
    token = gl.arange(0, 64, gl.BlockedLayout([1], [32], [num_warps], [0]))
    unit, begin = noted(notes, FIRST_UNIT, num_warps), noted(notes, BEGIN, num_warps)
    turn = unit * 0
    used = unit * 0
    values = as_fp8(turned, 512, 64, TURNED)
    while unit < noted(notes, BEHIND, num_warps):
        sequence, tile, blocks, lo, hi = share(
            notes, unit, begin, starts, lengths, tiles, HEADS, OVER, num_warps
        )  # fmt: skip
        if lo < hi:
            limit, length = limits(starts, lengths, sequence, tile, row, HEADS)
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
            for i in range(lo, hi):
                place = turn % STAGES
                known = length - i * 64
                slot = gl.load(tables + sequence * table_outer + i) * 64 + token
                key_scale = gl.load(scales + slot, mask=token < known, other=1.0)
                key_scale = gl.convert_layout(key_scale, gl.SliceLayout(0, SCORES_8))
                mbarrier.wait(ready.index(place), (turn // STAGES) & 1)
                barrier()  # the other warpgroup has done with the values before
                raw = raws.index(place)
                if known < 64:
                    wipe(raw, known, WIPE, 64, 512)
                    barrier()
                turn_values(raw, turned, TURN)
                keys = as_fp8(raw, 64, 512, TILE_8)
                s = gl.zeros([64, 64], gl.float32, SCORES_8)
                queries = as_fp8(only(q_tiles, turn), 64, 512, TILE_8)
                s = warpgroup_mma(queries, keys.permute((1, 0)), s, use_acc=False, is_async=True)
                r = gl.zeros([64, 64], gl.float32, SCORES)
                r = warpgroup_mma(rope_tile, ropes.index(place).permute((1, 0)), r, use_acc=False, is_async=True)
                s, r = warpgroup_mma_wait(0, deps=(s, r))
                mbarrier.arrive(free.index(place), count=1)
                exponents = exponent(key_scale)
                s = s * (q_scale[:, None] * key_scale[None, :]) + gl.convert_layout(r, SCORES_8) * scale
                seen = (anew(i) * 64 + within)[None, :] < limit[:, None]
                s = gl.where(seen, s, UNSEEN) + exponents.to(gl.float32)[None, :]
                higher = gl.maximum(highest, gl.max(s, 1))
                shrink = gl.exp2(highest - higher)
                p = gl.exp2(s - higher[:, None])
                total = total * shrink + gl.sum(p * power(-exponents)[None, :], 1)
                highest = higher
                p_tile.store((p * WEIGHT).to(gl.float8e4nv))
                fence_async_shared()
                shrink = gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
                barrier()
                first = promoted(first, shrink, p_tile, values, 0, RESULT)
                second = promoted(second, shrink, p_tile, values, 1, RESULT)
                third = promoted(third, shrink, p_tile, values, 2, RESULT)
                fourth = promoted(fourth, shrink, p_tile, values, 3, RESULT)
                turn += 1
            mbarrier.arrive(q_free, count=1)
            finish(
                (first, second, third, fourth), highest, total * WEIGHT, out, parts, masses, starts, lengths, tiles,
                notes, unit, begin, HEADS, OVER, 128, SCORES_8, RESULT, num_warps,
            )  # fmt: skip
        begin += gl.where(blocks > 0, blocks + OVER, 0)
        unit += 1


@gluon.jit
def mla_decode_fp8_mma(
    q, q_rope, kv, kv_rope, q_scales, scales, tables, starts, lengths, out, parts, masses, arrived, scale, table_outer,
    units, tiles,
    HEADS: gl.constexpr, STAGES: gl.constexpr, BLOCK_UNITS: gl.constexpr, OVER: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """`q` `[T H, 512]` and `kv` `[slots, 512]` are bits of FP8 numbers, `q_scales` `[T H]` and `scales` `[slots]` their
    scales; `q_rope` and `kv_rope` are bfloat16.
    """
    HALF: gl.constexpr = 64 // (num_warps // 4)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, HALF, 16])
    SCORES_8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, HALF, 32])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, 64, 32])
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    TILE_8: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    TURNED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    raws = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, 512], TILE_8)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE)
    turned = gl.allocate_shared_memory(gl.uint8, [512, 64], TURNED)
    rope_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    q_tiles = gl.allocate_shared_memory(gl.uint8, [1, 64, 512], TILE_8)
    p_tile = gl.allocate_shared_memory(gl.float8e4nv, [64, 64], TURNED)
    ready, free = barriers(STAGES, 1), barriers(STAGES, 1)
    q_ready, q_free = barriers(1, 1).index(0), barriers(1, 1).index(0)
    first_unit, behind, begin, last_begin, size = part_of(
        starts, lengths, units, tiles, HEADS, 1, BLOCK_UNITS, OVER, num_warps
    )  # fmt: skip
    notes = gl.allocate_shared_memory(gl.int32, [8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    note(notes, first_unit, begin, behind, last_begin, size, num_warps)
    gl.warp_specialize(
        [
            (
                compute,
                (
                    scales, q_scales, scale, out, parts, masses, tables, table_outer, starts, lengths, tiles,
                    q_tiles, rope_tile, p_tile, turned, raws, ropes, q_ready, q_free, ready, free,
                    notes, HEADS, STAGES, OVER, SCORES, SCORES_8, RESULT, TILE_8, TURNED,
                    num_warps,
                ),
            ),
            (
                load,
                (
                    q, q_rope, kv, kv_rope, tables, table_outer, starts, lengths, tiles,
                    q_tiles.index(0), rope_tile, raws, ropes, q_ready, q_free, ready, free,
                    first_unit, behind, begin, size, HEADS, STAGES, OVER, 64 * 640, 64 * 640, 0,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
    settle(out, parts, masses, arrived, starts, lengths, tiles, notes, HEADS, OVER, num_warps)
