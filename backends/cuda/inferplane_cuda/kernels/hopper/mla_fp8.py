"""Latent attention as in `mla`, over a quantized cache: half the bytes, dequantized to bfloat16 in shared memory.

Scales are powers of two, one a token and 64 entries. An FP8 number's bits, moved to where bfloat16 has its exponent and
mantissa, are that number times 2^-120; two multiplications, both exact, give the value. An int8 number times its scale
is rounded once. Products are in bfloat16. Slots beyond a sequence's end are read with scale 0, and no bits of either
format give NaN, so nothing of them reaches the result.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from inferplane_cuda.kernels.hopper import unit_results as work
from inferplane_cuda.kernels.hopper.barriers import key_limits
from inferplane_cuda.kernels.hopper.gluon_compat import barrier, first_tile, opaque, raise_fp8_exponent
from inferplane_cuda.kernels.hopper.mla import add_values, compute_scores, load_blocks
from inferplane_cuda.kernels.hopper.softmax import UNSEEN, softmax_step


@gluon.jit
def dequantize(raw, scale, FP8: gl.constexpr):
    """Bits (uint8) of FP8 (with FP8) or int8 numbers, times `scale`, in bfloat16."""
    x = raw.to(gl.int16)
    if FP8:
        bits = ((x & 0x80) << 8) | ((x & 0x7F) << 4)
        return raise_fp8_exponent(bits) * scale.to(gl.bfloat16)
    else:
        return (((x ^ 0x80) - 0x80).to(gl.float32) * scale).to(gl.bfloat16)


@gluon.jit
def compute_units(
    scales, scale, out, parts, masses, tables, table_outer, starts, lengths, tiles,
    q_tiles, rope_tile, p_tile, latents, rope, raws, raw_ropes, q_ready, q_free, ready, free,
    program_part,
    HEADS: gl.constexpr, STAGES: gl.constexpr, OVERHEAD: gl.constexpr, SCORES: gl.constexpr, RESULT: gl.constexpr,
    FP8: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The eight computing warps: dequantize a block, then compute as over a bfloat16 cache."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    within = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    row = gl.arange(0, 64, ROW)
    token = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    low = gl.arange(0, 128, gl.SliceLayout(0, WIDE)) < 64
    rope_token = gl.arange(0, 64, gl.SliceLayout(1, NARROW))
    unit = work.load_program_part(program_part, work.FIRST_UNIT, num_warps)
    begin = work.load_program_part(program_part, work.BEGIN, num_warps)
    step = unit * 0
    used = unit * 0
    while unit < work.load_program_part(program_part, work.END_UNIT, num_warps):
        sequence, tile, blocks, begin_block, end_block = work.load_unit_share(
            program_part, unit, begin, starts, lengths, tiles, HEADS, OVERHEAD, num_warps
        )  # fmt: skip
        if begin_block < end_block:
            limit, length = key_limits(starts, lengths, sequence, tile, row, HEADS)
            mbarrier.wait(q_ready, used & 1)
            used += 1
            highest = gl.full([64], UNSEEN, gl.float32, ROW)
            total = gl.zeros([64], gl.float32, ROW)
            acc = gl.zeros([64, 512], gl.float32, RESULT)
            for i in range(begin_block, end_block):
                stage = step % STAGES
                latent = first_tile(latents, step)
                first_scale = scales + gl.load(tables + sequence * table_outer + i).to(gl.int64) * (64 * 9)
                known = length - i * 64
                rope_scale = gl.load(first_scale + rope_token * 9 + 8, mask=rope_token < known, other=0.0)
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                barrier()  # the other warpgroup no longer reads the previous block
                rope.store(dequantize(raw_ropes.index(stage).load(NARROW), rope_scale[:, None], FP8))
                for part in gl.static_range(4):
                    left = gl.load(first_scale + token * 9 + 2 * part, mask=token < known, other=0.0)
                    right = gl.load(first_scale + token * 9 + 2 * part + 1, mask=token < known, other=0.0)
                    both = gl.where(low[None, :], left[:, None], right[:, None])
                    raw = raws.index(stage).slice(part * 128, 128, dim=1).load(WIDE)
                    latent.slice(part * 128, 128, dim=1).store(dequantize(raw, both, FP8))
                fence_async_shared()
                barrier()
                mbarrier.arrive(free.index(stage), count=1)
                keys = opaque(i) * 64 + within
                s = compute_scores(q_tiles, rope_tile, latent, rope, step, keys, limit, scale, SCORES)
                p, shrink, highest, total = softmax_step(s, highest, total)
                acc = add_values(acc, p, shrink, p_tile, latent, RESULT)
                step += 1
            mbarrier.arrive(q_free, count=1)
            work.store_unit_result(
                (acc,), highest, total, out, parts, masses, starts, lengths, tiles, program_part, unit,
                begin, HEADS, OVERHEAD, 512, SCORES, RESULT, num_warps,
            )  # fmt: skip
        begin += gl.where(blocks > 0, blocks + OVERHEAD, 0)
        unit += 1


@gluon.jit
def mla_decode_fp8(
    q, q_rope, kv, kv_rope, scales, tables, starts, lengths, out, parts, masses, arrived, scale, table_outer, units,
    tiles,
    HEADS: gl.constexpr, STAGES: gl.constexpr, BLOCK_UNITS: gl.constexpr, OVERHEAD: gl.constexpr, FP8: gl.constexpr,
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
    ready, free, q_ready, q_free, first_unit, end_unit, begin, size, program_part = work.begin_step(
        starts, lengths, units, tiles, HEADS, BLOCK_UNITS, OVERHEAD, STAGES, num_warps
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                compute_units,
                (
                    scales, scale, out, parts, masses, tables, table_outer, starts, lengths, tiles,
                    q_tiles, rope_tile, p_tile, latents, rope, raws, raw_ropes, q_ready, q_free, ready, free,
                    program_part, HEADS, STAGES, OVERHEAD, SCORES, RESULT, FP8, num_warps,
                ),
            ),
            (
                load_blocks,
                (
                    q, q_rope, kv, kv_rope, tables, table_outer, starts, lengths, tiles,
                    q_tiles.index(0), rope_tile, raws, raw_ropes, q_ready, q_free, ready, free,
                    first_unit, end_unit, begin, size, HEADS, STAGES, OVERHEAD, 64 * 576 * 2, 64 * 576, 512,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
    work.combine_units(out, parts, masses, arrived, starts, lengths, tiles, program_part, HEADS, OVERHEAD, num_warps)
