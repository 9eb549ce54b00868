"""A unit's end: its result is written, or put together from the parts of the programs that shared it.

When a program is through, it tells so of the units that it shares, at most its first and its last. The program that is
the last to do so of a unit adds up all parts, in the order of the programs, so that the result does not depend on who
was last. Nothing is launched behind, and the counters are left at zero for the next step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from inferplane_cuda.kernels.hopper.gluon_compat import anew, barrier
from inferplane_cuda.kernels.hopper.work_split import blocks_of, share_of

COLUMNS = gl.constexpr(64)
"""Columns that are put together at a time: few, so that the registers suffice."""
FIRST_UNIT, BEGIN, BEHIND = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
LAST_BEGIN, SIZE, PROGRAM = gl.constexpr(3), gl.constexpr(4), gl.constexpr(5)


@gluon.jit
def join(parts, masses, out, place, real, owner, sharers, num_warps: gl.constexpr):
    """Sum the parts of a unit with the weights of their masses into rows `place` of `out`."""
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
def note(notes, first_unit, begin, behind, last_begin, size, num_warps: gl.constexpr):
    """Put this program's share of the step, as `part_of` found it, into shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    at = gl.arange(0, 8, layout)
    low = gl.where(at == 0, first_unit, gl.where(at == 1, begin, behind))
    high = gl.where(at == 3, last_begin, gl.where(at == 4, size, gl.program_id(0)))
    notes.store(gl.where(at < 3, low, high))


@gluon.jit
def noted(notes, WHICH: gl.constexpr, num_warps: gl.constexpr):
    """One of what was noted: FIRST_UNIT, BEGIN, BEHIND, LAST_BEGIN, SIZE or PROGRAM. Read where it is used, since what
    lives in registers across the loop over blocks is paid for there.
    """
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    return gl.sum(gl.where(gl.arange(0, 8, layout) == WHICH, notes.load(layout), 0), 0)


@gluon.jit
def share(
    notes, unit, begin, starts, lengths, tiles, HEADS: gl.constexpr, OVER: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """Of a unit that begins at `begin`: sequence, tile, blocks, and this program's first and last of them."""
    sequence, tile = unit // tiles, unit % tiles
    blocks = blocks_of(starts, lengths, sequence, tile, HEADS, 1)
    me, size = noted(notes, PROGRAM, num_warps), noted(notes, SIZE, num_warps)
    lo, hi, _owner, _sharers = share_of(me, begin, blocks, size, 1, OVER)
    return sequence, tile, blocks, lo, hi


@gluon.jit
def finish(
    accs, highest, total, out, parts, masses, starts, lengths, tiles, notes, unit, begin,
    HEADS: gl.constexpr, OVER: gl.constexpr, WIDTH: gl.constexpr, SCORES: gl.constexpr, RESULT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """The end of this program's share of a unit: its result, WIDTH columns in each of `accs`, is written to `out`, or
    to this program's part of it.
    """
    sequence, tile, blocks, lo, hi = share(
        notes, anew(unit), anew(begin), starts, lengths, tiles, HEADS, OVER, num_warps
    )  # fmt: skip
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, RESULT))
    row = gl.arange(0, 64, gl.SliceLayout(1, RESULT))
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, RESULT))[:, None]
    if (lo == 0) & (hi == blocks):
        begin = gl.load(starts + sequence)
        count = gl.load(starts + sequence + 1) - begin
        place = begin * HEADS + tile * 64 + row
        real = (tile * 64 + row) // HEADS < count
        target = out + place.to(gl.int64)[:, None] * 512 + column[None, :]
        for i in gl.static_range(512 // WIDTH):
            gl.store(target + i * WIDTH, (accs[i] * inverse).to(gl.bfloat16), mask=real[:, None])
    else:
        part = 2 * noted(notes, PROGRAM, num_warps) + gl.where(lo == 0, 1, 0)
        unfinished = parts + (part * 64 + row).to(gl.int64)[:, None] * 512 + column[None, :]
        for i in gl.static_range(512 // WIDTH):
            gl.store(unfinished + i * WIDTH, accs[i] * inverse)
        gl.store(masses + part * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES)), highest + gl.log2(total))


@gluon.jit
def settle(
    out, parts, masses, arrived, starts, lengths, tiles, notes,
    HEADS: gl.constexpr, OVER: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Tell that this program's parts are there, and put together what it is the last to tell of."""
    first_unit, last_unit = noted(notes, FIRST_UNIT, num_warps), noted(notes, BEHIND, num_warps) - 1
    first_begin, last_begin = noted(notes, BEGIN, num_warps), noted(notes, LAST_BEGIN, num_warps)
    size, me = noted(notes, SIZE, num_warps), noted(notes, PROGRAM, num_warps)
    barrier()  # every thread's parts are written before one thread says so
    for unit in range(first_unit, last_unit + 1, gl.maximum(last_unit - first_unit, 1)):
        begin = gl.where(unit == first_unit, first_begin, last_begin)
        sequence, tile = unit // tiles, unit % tiles
        blocks = blocks_of(starts, lengths, sequence, tile, HEADS, 1)
        lo, hi, owner, sharers = share_of(me, begin, blocks, size, 1, OVER)
        before = lo * 0 - 1
        if (lo < hi) & (hi - lo < blocks):
            before = gl.atomic_add(arrived + owner, 1, sem="acq_rel")
        if before == sharers - 1:
            gl.store(arrived + owner, 0)
            row = gl.load(starts + sequence)
            real = (gl.load(starts + sequence + 1) - row) * HEADS - tile * 64
            join(parts, masses, out, row * HEADS + tile * 64, real, owner, sharers, num_warps)
