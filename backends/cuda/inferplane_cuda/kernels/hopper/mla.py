"""Latent attention of few query tokens on Hopper: units of 64 rows, loads by TMA, products by two warpgroups.

One warp loads; eight warps compute. Rows are tokens times heads, so 1 to 4 query tokens of 16 heads cost the same: one
pass over the cache. A block's latents are read from shared memory twice, as keys and, transposed, as values. The two
warpgroups divide scores by keys and the result by columns; probabilities are exchanged through shared memory.
What units and parts are: `work_split`.
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
from inferplane_cuda.kernels.hopper.gluon_compat import barrier, first_tile, load_tile, opaque
from inferplane_cuda.kernels.hopper.softmax import UNSEEN, softmax_step, zero_rows_from
from inferplane_cuda.kernels.hopper.work_split import count_blocks, find_unit_share

LATENT, ROPE = 512, 64


@gluon.jit
def load_blocks(
    q, q_rope, kv, kv_rope, tables, table_outer, starts, lengths, tiles,
    q_tile, rope_tile, latents, ropes, q_ready, q_free, ready, free,
    first_unit, end_unit, begin, size,
    HEADS: gl.constexpr, STAGES: gl.constexpr, OVERHEAD: gl.constexpr, Q_BYTES: gl.constexpr, KV_BYTES: gl.constexpr,
    ROPE_AT: gl.constexpr,
):  # fmt: skip
    """The loading warp: a unit's queries, then its blocks one after another into a ring of STAGES buffers."""
    step = first_unit * 0
    used = first_unit * 0
    for unit in range(first_unit, end_unit):
        sequence, tile = unit // tiles, unit % tiles
        blocks = count_blocks(starts, lengths, sequence, tile, HEADS, 1)
        begin_block, end_block, _owner, _sharers = find_unit_share(gl.program_id(0), begin, blocks, size, 1, OVERHEAD)
        if begin_block < end_block:
            mbarrier.wait(q_free, (used & 1) ^ 1)
            mbarrier.expect(q_ready, Q_BYTES)
            row = gl.load(starts + sequence) * HEADS + tile * 64
            load_tile(q, [row, 0], q_ready, q_tile)
            load_tile(q_rope, [row, 512], q_ready, rope_tile)
            used += 1
            for i in range(begin_block, end_block):
                stage = step % STAGES
                slot = gl.load(tables + sequence * table_outer + i) * 64
                mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(ready.index(stage), KV_BYTES)
                load_tile(kv_rope, [slot, ROPE_AT], ready.index(stage), ropes.index(stage))
                load_tile(kv, [slot, 0], ready.index(stage), latents.index(stage))
                step += 1
        begin += gl.where(blocks > 0, blocks + OVERHEAD, 0)


@gluon.jit
def compute_scores(q_tiles, rope_tile, latent, rope, step, keys, limit, scale, SCORES: gl.constexpr):
    """Scores of a block of 64 keys in powers of two; `UNSEEN` for keys from a row's `limit` on."""
    s = gl.zeros([64, 64], gl.float32, SCORES)
    s = warpgroup_mma(rope_tile, rope.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(first_tile(q_tiles, step), latent.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    return gl.where(keys[None, :] < limit[:, None], s * scale, UNSEEN)


@gluon.jit
def add_values(acc, p, shrink, p_tile, latent, RESULT: gl.constexpr):
    """Shrink the result so far, and add the block's values, weighted by `p`."""
    p_tile.store(p.to(gl.bfloat16))
    fence_async_shared()
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
    barrier()
    acc = warpgroup_mma(p_tile, latent, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit
def compute_units(
    scale, out, parts, masses, starts, lengths, tiles,
    q_tiles, rope_tile, p_tile, latents, ropes, q_ready, q_free, ready, free,
    program_part,
    HEADS: gl.constexpr, STAGES: gl.constexpr, OVERHEAD: gl.constexpr, SCORES: gl.constexpr, RESULT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """The eight computing warps: attention of this program's units, block by block."""
    ZERO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    within = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    row = gl.arange(0, 64, ROW)
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
                latent = latents.index(stage)
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                keys = opaque(i) * 64 + within
                s = compute_scores(q_tiles, rope_tile, latent, ropes.index(stage), step, keys, limit, scale, SCORES)
                p, shrink, highest, total = softmax_step(s, highest, total)
                if (i + 1) * 64 > length:
                    zero_rows_from(latent, length - i * 64, ZERO, 64, 512)
                acc = add_values(acc, p, shrink, p_tile, latent, RESULT)
                mbarrier.arrive(free.index(stage), count=1)
                step += 1
            mbarrier.arrive(q_free, count=1)
            work.store_unit_result(
                (acc,), highest, total, out, parts, masses, starts, lengths, tiles, program_part, unit,
                begin, HEADS, OVERHEAD, 512, SCORES, RESULT, num_warps,
            )  # fmt: skip
        begin += gl.where(blocks > 0, blocks + OVERHEAD, 0)
        unit += 1


@gluon.jit
def mla_decode(
    q, q_rope, kv, kv_rope, tables, starts, lengths, out, parts, masses, arrived, scale, table_outer, units, tiles,
    HEADS: gl.constexpr, STAGES: gl.constexpr, BLOCK_UNITS: gl.constexpr, OVERHEAD: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """The kernel over a bfloat16 cache; the module describes it.

    `q` and `q_rope` are descriptors of one tensor `[T H, 576]`, with boxes of 512 and of 64 columns; `kv` and `kv_rope`
    the same of the cache.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, 64 // (num_warps // 4), 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, 256, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    latents = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 512], TILE)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE)
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
                    scale, out, parts, masses, starts, lengths, tiles,
                    q_tiles, rope_tile, p_tile, latents, ropes, q_ready, q_free, ready, free,
                    program_part, HEADS, STAGES, OVERHEAD, SCORES, RESULT, num_warps,
                ),
            ),
            (
                load_blocks,
                (
                    q, q_rope, kv, kv_rope, tables, table_outer, starts, lengths, tiles,
                    q_tiles.index(0), rope_tile, latents, ropes, q_ready, q_free, ready, free,
                    first_unit, end_unit, begin, size, HEADS, STAGES, OVERHEAD, 64 * 576 * 2, 64 * 576 * 2, 512,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
    work.combine_units(out, parts, masses, arrived, starts, lengths, tiles, program_part, HEADS, OVERHEAD, num_warps)
