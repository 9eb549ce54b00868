"""Attention of many query tokens on Hopper, causal and ragged: 128 tokens of one head per program.

One warp loads keys and values in tiles of 128; two groups of four warps take 64 tokens each, so that the softmax of one
runs beside products of the other. Probabilities stay in registers. Keys and values lie in a paged cache, or side by
side, each `[N, heads x width]`; latent attention adds a rotated part that all heads share.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from inferplane_cuda.kernels.hopper.barriers import make_barriers
from inferplane_cuda.kernels.hopper.gluon_compat import barrier, load_tile
from inferplane_cuda.kernels.hopper.softmax import UNSEEN, softmax_step, zero_rows_from


@gluon.jit
def load_keys_and_values(
    q, q_rope, k, v, k_rope, table, row, q_row, q_head, kv_head, blocks, last_block,
    q_tile, q_rope_tile, keys, values, ropes, q_ready, k_ready, k_free, v_ready, v_free,
    ROPE: gl.constexpr, PAGED: gl.constexpr, STEP: gl.constexpr, VALUES_AT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: queries, then keys and values in tiles of 128, into rings of STAGES buffers."""
    mbarrier.expect(q_ready, 128 * (128 + ROPE) * 2)
    load_tile(q, [q_row, q_head * 128], q_ready, q_tile)
    if ROPE > 0:
        load_tile(q_rope, [q_row, q_head * ROPE], q_ready, q_rope_tile)
    for i in range(0, blocks):
        stage = i % STAGES
        phase = ((i // STAGES) & 1) ^ 1
        mbarrier.wait(k_free.index(stage), phase)
        mbarrier.expect(k_ready.index(stage), 128 * (128 + ROPE) * 2)
        for half in gl.static_range(2):
            first = row + i * 128 + half * 64
            if PAGED:
                first = gl.load(table + gl.minimum(2 * i + half, last_block)) * 64
            part = keys.index(stage).slice(half * 64, 64, dim=0)
            load_tile(k, [first, kv_head * STEP], k_ready.index(stage), part)
            if ROPE > 0:
                load_tile(k_rope, [first, 512], k_ready.index(stage), ropes.index(stage).slice(half * 64, 64, dim=0))
        mbarrier.wait(v_free.index(stage), phase)
        mbarrier.expect(v_ready.index(stage), 128 * 128 * 2)
        for half in gl.static_range(2):
            first = row + i * 128 + half * 64
            if PAGED:
                first = gl.load(table + gl.minimum(2 * i + half, last_block)) * 64
            part = values.index(stage).slice(half * 64, 64, dim=0)
            load_tile(v, [first, kv_head * STEP + VALUES_AT], v_ready.index(stage), part)


@gluon.jit
def compute_half_tile(
    out, scale, begin, length, count, first_token, blocks, out_token, out_head,
    q_tile, q_rope_tile, keys, values, ropes, q_ready, k_ready, k_free, v_ready, v_free,
    GROUP: gl.constexpr, ROPE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One group of four warps: tokens `64 GROUP` to `64 GROUP + 63` of the tile."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    ZERO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = first_token + GROUP * 64 + gl.arange(0, 64, ROW)
    within = gl.arange(0, 128, gl.SliceLayout(0, MMA))
    limit = length - count + token + 1
    all_see = length - count + first_token + GROUP * 64 + 1
    mbarrier.wait(q_ready, 0)
    mine = q_tile.slice(GROUP * 64, 64, dim=0)
    highest = gl.full([64], UNSEEN, gl.float32, ROW)
    total = gl.zeros([64], gl.float32, ROW)
    acc = gl.zeros([64, 128], gl.float32, MMA)
    for i in range(0, blocks):
        stage, phase = i % STAGES, (i // STAGES) & 1
        mbarrier.wait(k_ready.index(stage), phase)
        s = gl.zeros([64, 128], gl.float32, MMA)
        s = warpgroup_mma(mine, keys.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
        if ROPE > 0:
            query_rope = q_rope_tile.slice(GROUP * 64, 64, dim=0)
            s = warpgroup_mma(query_rope, ropes.index(stage).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_free.index(stage), count=1)
        s = s * scale
        if (i + 1) * 128 > all_see:
            s = gl.where((i * 128 + within)[None, :] < limit[:, None], s, UNSEEN)
        p, shrink, highest, total = softmax_step(s, highest, total)
        acc = acc * shrink[:, None]
        weights = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, MMA, 2))
        mbarrier.wait(v_ready.index(stage), phase)
        if (i + 1) * 128 > length:  # both groups do it to all rows, with the same result
            zero_rows_from(values.index(stage), length - i * 128, ZERO, 128, 128)
            barrier()
        acc = warpgroup_mma(weights, values.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_free.index(stage), count=1)
    acc = acc / total[:, None]
    target = out + (begin + token).to(gl.int64)[:, None] * out_token + out_head * 128 + within[None, :]
    gl.store(target, acc.to(gl.bfloat16), mask=(token < count)[:, None])


@gluon.jit
def prefill(
    q, q_rope, k, v, k_rope, tables, starts, lengths, before, out, scale, table_outer, out_token, first_head,
    GROUPED: gl.constexpr, ROPE: gl.constexpr, PAGED: gl.constexpr, STEP: gl.constexpr, VALUES_AT: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Program `(tile, head, sequence)`, the tiles that see most first. GROUPED query heads share a KV head; `before` is
    where a sequence's keys begin when they lie side by side.
    """
    sequence = gl.program_id(2)
    begin = gl.load(starts + sequence)
    count = gl.load(starts + sequence + 1) - begin
    length = gl.load(lengths + sequence)
    first_token = (gl.num_programs(0) - 1 - gl.program_id(0)) * 128
    blocks = gl.cdiv(length - count + gl.minimum(first_token + 128, count), 128)
    blocks = gl.where(first_token < count, blocks, 0)  # 0 for a tile beyond a short sequence's end
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WIDTH: gl.constexpr = ROPE if ROPE > 0 else 64
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [128, 128], TILE)
    q_rope_tile = gl.allocate_shared_memory(gl.bfloat16, [128, WIDTH], TILE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 128], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 128], TILE)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, WIDTH], TILE)
    q_ready = make_barriers(1, 1).index(0)
    k_ready, v_ready = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    k_free, v_free = make_barriers(STAGES, 2), make_barriers(STAGES, 2)
    head = gl.program_id(1)
    row = gl.load(before + sequence)
    table = tables + sequence * table_outer
    gl.warp_specialize(
        [
            (
                compute_half_tile,
                (
                    out, scale, begin, length, count, first_token, blocks, out_token, first_head + head,
                    q_tile, q_rope_tile, keys, values, ropes, q_ready, k_ready, k_free, v_ready, v_free,
                    0, ROPE, STAGES,
                ),
            ),
            (
                compute_half_tile,
                (
                    out, scale, begin, length, count, first_token, blocks, out_token, first_head + head,
                    q_tile, q_rope_tile, keys, values, ropes, q_ready, k_ready, k_free, v_ready, v_free,
                    1, ROPE, STAGES,
                ),
            ),
            (
                load_keys_and_values,
                (
                    q, q_rope, k, v, k_rope, table, row, begin + first_token, first_head + head, head // GROUPED,
                    blocks, (length - 1) // 64,
                    q_tile, q_rope_tile, keys, values, ropes, q_ready, k_ready, k_free, v_ready, v_free,
                    ROPE, PAGED, STEP, VALUES_AT, STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
