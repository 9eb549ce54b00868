"""A unit's end: its result is written, or put together from the parts of the programs that shared it.

When a program is through, it tells so of the units that it shares, at most its first and its last. The program that is
the last to do so of a unit adds up all parts, in the order of the programs, so that the result does not depend on who
was last. Nothing is launched behind, and the counters are left at zero for the next step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from inferplane_cuda.kernels.hopper.plan import blocks_of, share_of
from inferplane_cuda.kernels.hopper.tma import barrier

COLUMNS = gl.constexpr(64)
"""Columns that are put together at a time: few, so that the registers suffice."""


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
def finish(
    acc, highest, total, out, parts, masses, starts, sequence, tile, lo, hi, blocks,
    HEADS: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr, SCORES: gl.constexpr, RESULT: gl.constexpr,
):  # fmt: skip
    """The end of this program's share, blocks `lo` to `hi`, of a unit: columns FIRST to FIRST + WIDTH of its result are
    written to `out`, or to this program's part of it.
    """
    begin = gl.load(starts + sequence)
    count = gl.load(starts + sequence + 1) - begin
    column = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, RESULT))
    row = gl.arange(0, 64, gl.SliceLayout(1, RESULT))
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, RESULT))[:, None]
    if (lo == 0) & (hi == blocks):
        place = begin * HEADS + tile * 64 + row
        real = (tile * 64 + row) // HEADS < count
        target = out + place.to(gl.int64)[:, None] * 512 + column[None, :]
        gl.store(target, acc.to(gl.bfloat16), mask=real[:, None])
    else:
        part = 2 * gl.program_id(0) + gl.where(lo == 0, 1, 0)
        gl.store(parts + (part * 64 + row).to(gl.int64)[:, None] * 512 + column[None, :], acc)
        if FIRST == 0:
            gl.store(masses + part * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES)), highest + gl.log2(total))


@gluon.jit
def settle(
    out, parts, masses, arrived, starts, lengths, tiles, first_unit, first_begin, last_unit, last_begin, size,
    HEADS: gl.constexpr, OVER: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Tell that this program's parts are there, and put together what it is the last to tell of."""
    barrier()  # every thread's parts are written before one thread says so
    for unit in range(first_unit, last_unit + 1, gl.maximum(last_unit - first_unit, 1)):
        begin = gl.where(unit == first_unit, first_begin, last_begin)
        sequence, tile = unit // tiles, unit % tiles
        blocks = blocks_of(starts, lengths, sequence, tile, HEADS, 1)
        lo, hi, owner, sharers = share_of(begin, blocks, size, 1, OVER)
        before = lo * 0 - 1
        if (lo < hi) & (hi - lo < blocks):
            before = gl.atomic_add(arrived + owner, 1, sem="acq_rel")
        if before == sharers - 1:
            gl.store(arrived + owner, 0)
            row = gl.load(starts + sequence)
            real = (gl.load(starts + sequence + 1) - row) * HEADS - tile * 64
            join(parts, masses, out, row * HEADS + tile * 64, real, owner, sharers, num_warps)
