"""Latent attention of few query tokens on Hopper: units of 64 rows, loads by TMA, products by two warpgroups.

One warp loads; eight warps compute. Rows are tokens times heads, so 1 to 4 query tokens of 16 heads cost the same: one
pass over the cache. A block's latents are read from shared memory twice, as keys and, transposed, as values. Scores are
split over the two warpgroups by keys, the result by columns; probabilities cross through shared memory.
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
from inferplane_cuda.kernels.hopper.gluon_compat import anew, barrier, load_tile, only
from inferplane_cuda.kernels.hopper.softmax import UNSEEN, weigh, wipe
from inferplane_cuda.kernels.hopper.unit_results import BEGIN, BEHIND, FIRST_UNIT, finish, note, noted, settle, share
from inferplane_cuda.kernels.hopper.work_split import blocks_of, part_of, share_of

LATENT, ROPE = 512, 64


@gluon.jit
def load(
    q, q_rope, kv, kv_rope, tables, table_outer, starts, lengths, tiles,
    q_tile, rope_tile, latents, ropes, q_ready, q_free, ready, free,
    first_unit, behind, begin, size,
    HEADS: gl.constexpr, STAGES: gl.constexpr, OVER: gl.constexpr, Q_BYTES: gl.constexpr, KV_BYTES: gl.constexpr,
    ROPE_AT: gl.constexpr,
):  # fmt: skip
    """The loading warp: a unit's queries, then its blocks one after another into a ring of STAGES places."""
    turn = first_unit * 0
    used = first_unit * 0
    for unit in range(first_unit, behind):
        sequence, tile = unit // tiles, unit % tiles
        blocks = blocks_of(starts, lengths, sequence, tile, HEADS, 1)
        lo, hi, _owner, _sharers = share_of(gl.program_id(0), begin, blocks, size, 1, OVER)
        if lo < hi:
            mbarrier.wait(q_free, (used & 1) ^ 1)
            mbarrier.expect(q_ready, Q_BYTES)
            row = gl.load(starts + sequence) * HEADS + tile * 64
            load_tile(q, [row, 0], q_ready, q_tile)
            load_tile(q_rope, [row, 512], q_ready, rope_tile)
            used += 1
            for i in range(lo, hi):
                place = turn % STAGES
                slot = gl.load(tables + sequence * table_outer + i) * 64
                mbarrier.wait(free.index(place), ((turn // STAGES) & 1) ^ 1)
                mbarrier.expect(ready.index(place), KV_BYTES)
                load_tile(kv_rope, [slot, ROPE_AT], ready.index(place), ropes.index(place))
                load_tile(kv, [slot, 0], ready.index(place), latents.index(place))
                turn += 1
        begin += gl.where(blocks > 0, blocks + OVER, 0)


@gluon.jit
def scored(q_tiles, rope_tile, latent, rope, turn, keys, limit, scale, SCORES: gl.constexpr):
    """Scores of a block, in powers of two, and `UNSEEN` where a row must not see a key."""
    s = gl.zeros([64, 64], gl.float32, SCORES)
    s = warpgroup_mma(rope_tile, rope.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(only(q_tiles, turn), latent.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    return gl.where(keys[None, :] < limit[:, None], s * scale, UNSEEN)


@gluon.jit
def added(acc, p, shrink, p_tile, latent, RESULT: gl.constexpr):
    """The result so far, shrunk, and the block's values weighed by `p`."""
    p_tile.store(p.to(gl.bfloat16))
    fence_async_shared()
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
    barrier()
    acc = warpgroup_mma(p_tile, latent, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit
def compute(
    scale, out, parts, masses, starts, lengths, tiles,
    q_tiles, rope_tile, p_tile, latents, ropes, q_ready, q_free, ready, free,
    notes,
    HEADS: gl.constexpr, STAGES: gl.constexpr, OVER: gl.constexpr, SCORES: gl.constexpr, RESULT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """The eight computing warps."""
    WIPE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    within = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    row = gl.arange(0, 64, ROW)
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
                latent = latents.index(place)
                mbarrier.wait(ready.index(place), (turn // STAGES) & 1)
                keys = anew(i) * 64 + within
                s = scored(q_tiles, rope_tile, latent, ropes.index(place), turn, keys, limit, scale, SCORES)
                p, shrink, highest, total = weigh(s, highest, total)
                if (i + 1) * 64 > length:
                    wipe(latent, length - i * 64, WIPE, 64, 512)
                acc = added(acc, p, shrink, p_tile, latent, RESULT)
                mbarrier.arrive(free.index(place), count=1)
                turn += 1
            mbarrier.arrive(q_free, count=1)
            finish(
                (acc,), highest, total, out, parts, masses, starts, lengths, tiles, notes, unit,
                begin, HEADS, OVER, 512, SCORES, RESULT, num_warps,
            )  # fmt: skip
        begin += gl.where(blocks > 0, blocks + OVER, 0)
        unit += 1


@gluon.jit
def mla_decode(
    q, q_rope, kv, kv_rope, tables, starts, lengths, out, parts, masses, arrived, scale, table_outer, units, tiles,
    HEADS: gl.constexpr, STAGES: gl.constexpr, BLOCK_UNITS: gl.constexpr, OVER: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """See the module. `q` and `q_rope` are one `[T H, 576]` seen by boxes of 512 and 64 columns, `kv` likewise."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, 64 // (num_warps // 4), 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, 256, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    latents = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 512], TILE)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE)
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
                    scale, out, parts, masses, starts, lengths, tiles,
                    q_tiles, rope_tile, p_tile, latents, ropes, q_ready, q_free, ready, free,
                    notes, HEADS, STAGES, OVER, SCORES, RESULT, num_warps,
                ),
            ),
            (
                load,
                (
                    q, q_rope, kv, kv_rope, tables, table_outer, starts, lengths, tiles,
                    q_tiles.index(0), rope_tile, latents, ropes, q_ready, q_free, ready, free,
                    first_unit, behind, begin, size, HEADS, STAGES, OVER, 64 * 576 * 2, 64 * 576 * 2, 512,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
    settle(out, parts, masses, arrived, starts, lengths, tiles, notes, HEADS, OVER, num_warps)
