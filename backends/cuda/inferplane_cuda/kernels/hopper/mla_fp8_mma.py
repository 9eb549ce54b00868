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

from inferplane_cuda.kernels.hopper.mla import load
from inferplane_cuda.kernels.hopper.plan import blocks_of, part_of, share_of
from inferplane_cuda.kernels.hopper.ring import barriers, limits
from inferplane_cuda.kernels.hopper.softmax import UNSEEN
from inferplane_cuda.kernels.hopper.tma import as_fp8, barrier
from inferplane_cuda.kernels.hopper.units import finish, settle

WEIGHT = gl.constexpr(256.0)
"""What weights are multiplied by before they become FP8, whose largest number is 448."""


@gluon.jit
def turn_values(raw, turned, known, layout: gl.constexpr):
    """`raw` `[64, 512]` into `turned` `[512, 64]`, zeros from token `known` on."""
    token = gl.arange(0, 64, gl.SliceLayout(1, layout))
    for part in gl.static_range(4):
        x = raw.slice(part * 128, 128, dim=1).load(layout)
        x = gl.where((token < known)[:, None], x, gl.zeros_like(x))
        turned.slice(part * 128, 128, dim=0).permute((1, 0)).store(x)


@gluon.jit
def compute(
    scales, q_scales, scale, out, parts, masses, tables, table_outer, starts, lengths, tiles,
    q_tile, rope_tile, p_tile, turned, raws, ropes, q_ready, q_free, ready, free,
    first_unit, behind, begin, size,
    HEADS: gl.constexpr, STAGES: gl.constexpr, OVER: gl.constexpr, SCORES: gl.constexpr, SCORES_8: gl.constexpr,
    RESULT: gl.constexpr, TILE_8: gl.constexpr, TURNED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The eight computing warps."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES_8)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    within = gl.arange(0, 64, gl.SliceLayout(0, SCORES_8))
    row = gl.arange(0, 64, ROW)
    turn = first_unit * 0
    used = first_unit * 0
    values = as_fp8(turned, 512, 64, TURNED)
    queries = as_fp8(q_tile, 64, 512, TILE_8)
    for unit in range(first_unit, behind):
        sequence, tile = unit // tiles, unit % tiles
        blocks = blocks_of(starts, lengths, sequence, tile, HEADS, 1)
        lo, hi, _owner, _sharers = share_of(begin, blocks, size, 1, OVER)
        if lo < hi:
            limit, length = limits(starts, lengths, sequence, tile, row, HEADS)
            first = gl.load(starts + sequence)
            real = tile * 64 + row < (gl.load(starts + sequence + 1) - first) * HEADS
            q_scale = gl.load(q_scales + first * HEADS + tile * 64 + row, mask=real, other=0.0) * scale
            mbarrier.wait(q_ready, used & 1)
            used += 1
            highest = gl.full([64], UNSEEN, gl.float32, ROW)
            total = gl.zeros([64], gl.float32, ROW)
            left = gl.zeros([64, 256], gl.float32, RESULT)
            right = gl.zeros([64, 256], gl.float32, RESULT)
            for i in range(lo, hi):
                place = turn % STAGES
                known = length - i * 64
                slot = gl.load(tables + sequence * table_outer + i).to(gl.int64) * 64
                key_scale = gl.load(scales + slot + within, mask=within < known, other=1.0)
                mbarrier.wait(ready.index(place), (turn // STAGES) & 1)
                barrier()  # the other warpgroup has done with the values before
                turn_values(raws.index(place), turned, known, WIDE)
                keys = as_fp8(raws.index(place), 64, 512, TILE_8)
                s = gl.zeros([64, 64], gl.float32, SCORES_8)
                s = warpgroup_mma(queries, keys.permute((1, 0)), s, use_acc=False, is_async=True)
                r = gl.zeros([64, 64], gl.float32, SCORES)
                r = warpgroup_mma(rope_tile, ropes.index(place).permute((1, 0)), r, use_acc=False, is_async=True)
                s, r = warpgroup_mma_wait(0, deps=(s, r))
                mbarrier.arrive(free.index(place), count=1)
                s = s * (q_scale[:, None] * key_scale[None, :]) + gl.convert_layout(r, SCORES_8) * scale
                s = gl.where((i * 64 + within)[None, :] < limit[:, None], s, UNSEEN) + gl.log2(key_scale)[None, :]
                higher = gl.maximum(highest, gl.max(s, 1))
                shrink = gl.exp2(highest - higher)
                p = gl.exp2(s - higher[:, None])
                total = total * shrink + gl.sum(p / key_scale[None, :], 1)
                highest = higher
                p_tile.store((p * WEIGHT).to(gl.float8e4nv))
                fence_async_shared()
                shrink = gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
                barrier()
                more = gl.zeros([64, 256], gl.float32, RESULT)
                low = values.slice(0, 256, dim=0).permute((1, 0))
                more = warpgroup_mma(p_tile, low, more, use_acc=False, is_async=True)
                left = left * shrink + warpgroup_mma_wait(0, deps=(more,))
                more = gl.zeros([64, 256], gl.float32, RESULT)
                high = values.slice(256, 256, dim=0).permute((1, 0))
                more = warpgroup_mma(p_tile, high, more, use_acc=False, is_async=True)
                right = right * shrink + warpgroup_mma_wait(0, deps=(more,))
                turn += 1
            mbarrier.arrive(q_free, count=1)
            finish(
                left / WEIGHT, highest, total, out, parts, masses, starts, sequence, tile, lo, hi, blocks,
                HEADS, 0, 256, SCORES_8, RESULT,
            )  # fmt: skip
            finish(
                right / WEIGHT, highest, total, out, parts, masses, starts, sequence, tile, lo, hi, blocks,
                HEADS, 256, 256, SCORES_8, RESULT,
            )  # fmt: skip
        begin += gl.where(blocks > 0, blocks + OVER, 0)


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
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, 128, 32])
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    TILE_8: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    TURNED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    raws = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, 512], TILE_8)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE)
    turned = gl.allocate_shared_memory(gl.uint8, [512, 64], TURNED)
    rope_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    q_tile = gl.allocate_shared_memory(gl.uint8, [64, 512], TILE_8)
    p_tile = gl.allocate_shared_memory(gl.float8e4nv, [64, 64], TURNED)
    ready, free = barriers(STAGES, 1), barriers(STAGES, 1)
    q_ready, q_free = barriers(1, 1).index(0), barriers(1, 1).index(0)
    first_unit, behind, begin, last_begin, size = part_of(
        starts, lengths, units, tiles, HEADS, 1, BLOCK_UNITS, OVER, num_warps
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                compute,
                (
                    scales, q_scales, scale, out, parts, masses, tables, table_outer, starts, lengths, tiles,
                    q_tile, rope_tile, p_tile, turned, raws, ropes, q_ready, q_free, ready, free,
                    first_unit, behind, begin, size, HEADS, STAGES, OVER, SCORES, SCORES_8, RESULT, TILE_8, TURNED,
                    num_warps,
                ),
            ),
            (
                load,
                (
                    q, q_rope, kv, kv_rope, tables, table_outer, starts, lengths, tiles,
                    q_tile, rope_tile, raws, ropes, q_ready, q_free, ready, free,
                    first_unit, behind, begin, size, HEADS, STAGES, OVER, 64 * 640, 64 * 640, 0,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
    settle(
        out, parts, masses, arrived, starts, lengths, tiles, first_unit, begin, behind - 1, last_begin, size,
        HEADS, OVER, num_warps,
    )  # fmt: skip
