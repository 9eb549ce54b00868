"""Begin and end of a program's part of latent attention: storing a unit's result, or combining it from several parts.

A program shares at most its first and its last unit with other programs (`work_split`). When it has stored its part of
a shared unit, it is counted; the last program to be counted adds up all parts, in the order of the programs, so that
the result does not depend on which was last. No launch follows, and counters are zero again for the next step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from inferplane_cuda.kernels.hopper.barriers import make_barriers
from inferplane_cuda.kernels.hopper.gluon_compat import barrier, opaque
from inferplane_cuda.kernels.hopper.work_split import count_blocks, find_program_part, find_unit_share

COLUMNS = gl.constexpr(64)
"""Columns that are combined at a time: few, so that registers suffice."""
FIRST_UNIT, BEGIN, END_UNIT = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
LAST_BEGIN, SIZE, PROGRAM = gl.constexpr(3), gl.constexpr(4), gl.constexpr(5)


@gluon.jit
def combine_parts(parts, masses, out, place, real, owner, sharers, num_warps: gl.constexpr):
    """Add up a unit's parts into rows `place` of `out`; `masses` are the base-2 logarithms of their sums of weights."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [num_warps, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    for group in range(0, 512 // COLUMNS):
        column = group * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        first = (2 * owner + 1) * 64 + row
        highest = gl.load(masses + first, cache_modifier=".cg")
        acc = gl.load(parts + first.to(gl.int64)[:, None] * 512 + column[None, :], cache_modifier=".cg")
        total = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, layout))
        for program in range(owner + 1, owner + sharers):
            at = 2 * program * 64 + row
            mass = gl.load(masses + at, cache_modifier=".cg")
            part = gl.load(parts + at.to(gl.int64)[:, None] * 512 + column[None, :], cache_modifier=".cg")
            higher = gl.maximum(highest, mass)
            shrink, weight = gl.exp2(highest - higher), gl.exp2(mass - higher)
            acc = acc * shrink[:, None] + part * weight[:, None]
            total = total * shrink + weight
            highest = higher
        target = out + (place + row).to(gl.int64)[:, None] * 512 + column[None, :]
        gl.store(target, (acc / total[:, None]).to(gl.bfloat16), mask=(row < real)[:, None])


@gluon.jit
def store_program_part(program_part, first_unit, begin, end_unit, last_begin, size, num_warps: gl.constexpr):
    """Store this program's part of the step, as `find_program_part` found it, in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    at = gl.arange(0, 8, layout)
    low = gl.where(at == 0, first_unit, gl.where(at == 1, begin, end_unit))
    high = gl.where(at == 3, last_begin, gl.where(at == 4, size, gl.program_id(0)))
    program_part.store(gl.where(at < 3, low, high))


@gluon.jit
def begin_step(
    starts, lengths, units, tiles,
    HEADS: gl.constexpr, BLOCK_UNITS: gl.constexpr, OVERHEAD: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """What every kernel of latent attention begins with.

    Returns:
        Barriers of the ring of blocks (ready and free, STAGES each) and of the query tile (ready and free); this
        program's first unit, the unit after its last, where its first one begins, and the size of a part; and the same
        in shared memory, for `load_program_part`.
    """
    ready, free = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    q_ready, q_free = make_barriers(1, 1).index(0), make_barriers(1, 1).index(0)
    first_unit, end_unit, begin, last_begin, size = find_program_part(
        starts, lengths, units, tiles, HEADS, 1, BLOCK_UNITS, OVERHEAD, num_warps
    )  # fmt: skip
    program_part = gl.allocate_shared_memory(gl.int32, [8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    store_program_part(program_part, first_unit, begin, end_unit, last_begin, size, num_warps)
    return ready, free, q_ready, q_free, first_unit, end_unit, begin, size, program_part


@gluon.jit
def load_program_part(program_part, WHICH: gl.constexpr, num_warps: gl.constexpr):
    """Load one entry of `program_part`: FIRST_UNIT, BEGIN, END_UNIT, LAST_BEGIN, SIZE or PROGRAM.

    It is loaded where it is used, since a value kept across the loop over blocks costs registers there.
    """
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    return gl.sum(gl.where(gl.arange(0, 8, layout) == WHICH, program_part.load(layout), 0), 0)


@gluon.jit
def load_unit_share(
    program_part, unit, begin, starts, lengths, tiles,
    HEADS: gl.constexpr, OVERHEAD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Of the unit that begins at `begin`: sequence, tile, number of blocks, and the range of blocks of this program."""
    sequence, tile = unit // tiles, unit % tiles
    blocks = count_blocks(starts, lengths, sequence, tile, HEADS, 1)
    program = load_program_part(program_part, PROGRAM, num_warps)
    size = load_program_part(program_part, SIZE, num_warps)
    begin_block, end_block, _owner, _sharers = find_unit_share(program, begin, blocks, size, 1, OVERHEAD)
    return sequence, tile, blocks, begin_block, end_block


@gluon.jit
def store_unit_result(
    accs, highest, total, out, parts, masses, starts, lengths, tiles, program_part, unit, begin,
    HEADS: gl.constexpr, OVERHEAD: gl.constexpr, WIDTH: gl.constexpr, SCORES: gl.constexpr, RESULT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Store the result of this program's share of a unit: in `out` if that is the whole unit, else in its `parts`.

    `accs` hold WIDTH columns each, not yet divided by `total`.
    """
    sequence, tile, blocks, begin_block, end_block = load_unit_share(
        program_part, opaque(unit), opaque(begin), starts, lengths, tiles, HEADS, OVERHEAD, num_warps
    )  # fmt: skip
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, RESULT))
    row = gl.arange(0, 64, gl.SliceLayout(1, RESULT))
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, RESULT))[:, None]
    if (begin_block == 0) & (end_block == blocks):
        begin = gl.load(starts + sequence)
        count = gl.load(starts + sequence + 1) - begin
        place = begin * HEADS + tile * 64 + row
        real = (tile * 64 + row) // HEADS < count
        target = out + place.to(gl.int64)[:, None] * 512 + column[None, :]
        for i in gl.static_range(512 // WIDTH):
            gl.store(target + i * WIDTH, (accs[i] * inverse).to(gl.bfloat16), mask=real[:, None])
    else:
        part = 2 * load_program_part(program_part, PROGRAM, num_warps) + gl.where(begin_block == 0, 1, 0)
        unfinished = parts + (part * 64 + row).to(gl.int64)[:, None] * 512 + column[None, :]
        for i in gl.static_range(512 // WIDTH):
            gl.store(unfinished + i * WIDTH, accs[i] * inverse)
        gl.store(masses + part * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES)), highest + gl.log2(total))


@gluon.jit
def combine_units(
    out, parts, masses, arrived, starts, lengths, tiles, program_part,
    HEADS: gl.constexpr, OVERHEAD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Count this program's parts of shared units, and combine the units of which it is the last."""
    first_unit = load_program_part(program_part, FIRST_UNIT, num_warps)
    last_unit = load_program_part(program_part, END_UNIT, num_warps) - 1
    first_begin = load_program_part(program_part, BEGIN, num_warps)
    last_begin = load_program_part(program_part, LAST_BEGIN, num_warps)
    size = load_program_part(program_part, SIZE, num_warps)
    program = load_program_part(program_part, PROGRAM, num_warps)
    barrier()  # every thread has stored its parts before one thread counts the program
    for unit in range(first_unit, last_unit + 1, gl.maximum(last_unit - first_unit, 1)):
        begin = gl.where(unit == first_unit, first_begin, last_begin)
        sequence, tile = unit // tiles, unit % tiles
        blocks = count_blocks(starts, lengths, sequence, tile, HEADS, 1)
        begin_block, end_block, owner, sharers = find_unit_share(program, begin, blocks, size, 1, OVERHEAD)
        before = begin_block * 0 - 1
        if (begin_block < end_block) & (end_block - begin_block < blocks):
            before = gl.atomic_add(arrived + owner, 1, sem="acq_rel")
        if before == sharers - 1:
            gl.store(arrived + owner, 0)
            row = gl.load(starts + sequence)
            real = (gl.load(starts + sequence + 1) - row) * HEADS - tile * 64
            combine_parts(parts, masses, out, row * HEADS + tile * 64, real, owner, sharers, num_warps)
