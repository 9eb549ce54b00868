"""The same over a quantized cache: half the bytes, widened to bfloat16 in shared memory by the computing warps.

Scales are powers of two, one a token and 64 entries. An FP8 number's bits, moved to where bfloat16 has its exponent and
mantissa, are that number times 2^-120; two products, both exact, make it what it stands for. An int8 number times its
scale is rounded once. Products are bfloat16's. Slots beyond a sequence's end are read with scale 0, and no bits of
either format widen to NaN, so nothing of theirs comes through.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from inferplane_cuda.kernels.hopper.barriers import barriers, limits
from inferplane_cuda.kernels.hopper.gluon_compat import anew, barrier, only, raised
from inferplane_cuda.kernels.hopper.mla import added, load, scored
from inferplane_cuda.kernels.hopper.softmax import UNSEEN, weigh
from inferplane_cuda.kernels.hopper.unit_results import BEGIN, BEHIND, FIRST_UNIT, finish, note, noted, settle, share
from inferplane_cuda.kernels.hopper.work_split import part_of


@gluon.jit
def widen(raw, scale, FP8: gl.constexpr):
    """Bits (uint8) of FP8 or int8 numbers times scales: bfloat16."""
    x = raw.to(gl.int16)
    if FP8:
        bits = ((x & 0x80) << 8) | ((x & 0x7F) << 4)
        return raised(bits) * scale.to(gl.bfloat16)
    else:
        return (((x ^ 0x80) - 0x80).to(gl.float32) * scale).to(gl.bfloat16)


@gluon.jit
def compute(
    scales, scale, out, parts, masses, tables, table_outer, starts, lengths, tiles,
    q_tiles, rope_tile, p_tile, latents, rope, raws, raw_ropes, q_ready, q_free, ready, free,
    notes,
    HEADS: gl.constexpr, STAGES: gl.constexpr, OVER: gl.constexpr, SCORES: gl.constexpr, RESULT: gl.constexpr,
    FP8: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The eight computing warps: widen a block, then as over a bfloat16 cache."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    within = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    row = gl.arange(0, 64, ROW)
    token = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    low = gl.arange(0, 128, gl.SliceLayout(0, WIDE)) < 64
    rope_token = gl.arange(0, 64, gl.SliceLayout(1, NARROW))
    unit, begin = noted(notes, FIRST_UNIT, num_warps), noted(notes, BEGIN, num_warps)
    turn = unit * 0
    used = unit * 0
    while unit < noted(notes, BEHIND, num_warps):
        sequence, tile, blocks, lo, hi = share(
            notes, unit, begin, starts, lengths, tiles, HEADS, OVER, num_warps
        )  # fmt: skip
        if lo < hi:
            limit, length = limits(starts, lengths, sequence, tile, row, HEADS)
            mbarrier.wait(q_ready, used & 1)
            used += 1
            highest = gl.full([64], UNSEEN, gl.float32, ROW)
            total = gl.zeros([64], gl.float32, ROW)
            acc = gl.zeros([64, 512], gl.float32, RESULT)
            for i in range(lo, hi):
                place = turn % STAGES
                latent = only(latents, turn)
                first_scale = scales + gl.load(tables + sequence * table_outer + i).to(gl.int64) * (64 * 9)
                known = length - i * 64
                rope_scale = gl.load(first_scale + rope_token * 9 + 8, mask=rope_token < known, other=0.0)
                mbarrier.wait(ready.index(place), (turn // STAGES) & 1)
                barrier()  # the other warpgroup has done with the block before
                rope.store(widen(raw_ropes.index(place).load(NARROW), rope_scale[:, None], FP8))
                for part in gl.static_range(4):
                    left = gl.load(first_scale + token * 9 + 2 * part, mask=token < known, other=0.0)
                    right = gl.load(first_scale + token * 9 + 2 * part + 1, mask=token < known, other=0.0)
                    both = gl.where(low[None, :], left[:, None], right[:, None])
                    raw = raws.index(place).slice(part * 128, 128, dim=1).load(WIDE)
                    latent.slice(part * 128, 128, dim=1).store(widen(raw, both, FP8))
                fence_async_shared()
                barrier()
                mbarrier.arrive(free.index(place), count=1)
                keys = anew(i) * 64 + within
                s = scored(q_tiles, rope_tile, latent, rope, turn, keys, limit, scale, SCORES)
                p, shrink, highest, total = weigh(s, highest, total)
                acc = added(acc, p, shrink, p_tile, latent, RESULT)
                turn += 1
            mbarrier.arrive(q_free, count=1)
            finish(
                (acc,), highest, total, out, parts, masses, starts, lengths, tiles, notes, unit,
                begin, HEADS, OVER, 512, SCORES, RESULT, num_warps,
            )  # fmt: skip
        begin += gl.where(blocks > 0, blocks + OVER, 0)
        unit += 1


@gluon.jit
def mla_decode_fp8(
    q, q_rope, kv, kv_rope, scales, tables, starts, lengths, out, parts, masses, arrived, scale, table_outer, units,
    tiles,
    HEADS: gl.constexpr, STAGES: gl.constexpr, BLOCK_UNITS: gl.constexpr, OVER: gl.constexpr, FP8: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """As `mla_decode`; `kv` holds bits of FP8 or int8 numbers, `scales` `[slots, 9]` float32."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, 64 // (num_warps // 4), 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, 256, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    RAW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    RAW_ROPE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    raws = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, 512], RAW)
    raw_ropes = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, 64], RAW_ROPE)
    latents = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 512], TILE)
    rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    rope_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 512], TILE)
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
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
                    scales, scale, out, parts, masses, tables, table_outer, starts, lengths, tiles,
                    q_tiles, rope_tile, p_tile, latents, rope, raws, raw_ropes, q_ready, q_free, ready, free,
                    notes, HEADS, STAGES, OVER, SCORES, RESULT, FP8, num_warps,
                ),
            ),
            (
                load,
                (
                    q, q_rope, kv, kv_rope, tables, table_outer, starts, lengths, tiles,
                    q_tiles.index(0), rope_tile, raws, raw_ropes, q_ready, q_free, ready, free,
                    first_unit, behind, begin, size, HEADS, STAGES, OVER, 64 * 576 * 2, 64 * 576, 512,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
    settle(out, parts, masses, arrived, starts, lengths, tiles, notes, HEADS, OVER, num_warps)
