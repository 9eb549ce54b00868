"""Divides a step's latent attention among programs: each finds its own part, from lengths on the device.

A unit is 64 query rows (tokens times heads) of one sequence; its work is the blocks of keys that they see, plus an
overhead. The units of a step, laid end to end, are divided into as many equal parts as there are programs, at any
block: a unit may be shared by several programs, and a program may have several units. Where a unit begins is a prefix
sum over lengths, which every program computes for itself; the rest is arithmetic. Nothing is planned on the host and
nothing is launched before, so a captured step stays right when lengths change.

A program shares at most its first and its last unit with others, so it needs space for two unfinished results.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = 64
"""Query rows of a unit: the rows of a warpgroup's matrix instruction."""
KEYS = 64
"""Keys of a block: the cache's block."""
UNIT_OVERHEAD = 4
"""Cost of beginning a unit, in blocks: its queries are loaded and its result is stored."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def count_blocks(starts, lengths, sequence, tile, HEADS: gl.constexpr, STEP: gl.constexpr):
    """Blocks of keys that a unit's rows see, rounded up to a multiple of STEP; 0 for a unit without rows."""
    count = gl.load(starts + sequence + 1) - gl.load(starts + sequence)
    length = gl.load(lengths + sequence)
    first = tile * 64 // HEADS
    last = gl.minimum((tile * 64 + 63) // HEADS + 1, count)
    keys = length - count + last
    return gl.where((first < count) & (length > 0), gl.cdiv(keys, 64 * STEP) * STEP, 0)


@gluon.jit
def find_program_part(
    starts, lengths, units, tiles,
    HEADS: gl.constexpr, STEP: gl.constexpr, BLOCK_UNITS: gl.constexpr, OVERHEAD: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """This program's part: its first unit, the unit after its last, where its first and last begin, and a part's size.

    Begins are counted in blocks from the start of the step.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    unit = gl.arange(0, BLOCK_UNITS, layout)
    inside = unit < units
    sequence = gl.where(inside, unit // tiles, 0)
    blocks = gl.where(inside, count_blocks(starts, lengths, sequence, unit % tiles, HEADS, STEP), 0)
    cost = gl.where(blocks > 0, blocks + OVERHEAD, 0)
    end = gl.associative_scan(cost, 0, _add)
    size = gl.maximum(gl.cdiv(gl.sum(cost, 0), gl.num_programs(0) * STEP) * STEP, STEP + OVERHEAD)
    low = gl.program_id(0) * size
    first = gl.sum(gl.where(inside & (end <= low), 1, 0), 0)
    end_unit = gl.sum(gl.where(inside & (end - cost + OVERHEAD < low + size), 1, 0), 0)
    begin = gl.max(gl.where(inside & (end <= low), end, 0), 0)
    last_begin = gl.max(gl.where(unit == end_unit - 1, end - cost, 0), 0)
    return first, end_unit, begin, last_begin, size


@gluon.jit
def find_unit_share(program, begin, blocks, size, STEP: gl.constexpr, OVERHEAD: gl.constexpr):
    """How a unit of `blocks` blocks that begins at `begin` is shared.

    Returns the blocks `first` to `last` of program number `program`, the first program that has some of the unit, and
    how many programs have.
    """
    at = begin + OVERHEAD
    low = program * size - at
    first = gl.minimum(gl.maximum(gl.cdiv(low, STEP) * STEP, 0), blocks)
    last = gl.minimum(gl.maximum(gl.cdiv(low + size, STEP) * STEP, 0), blocks)
    owner = at // size
    sharers = (at + blocks - STEP) // size - owner + 1
    return first, last, owner, sharers
