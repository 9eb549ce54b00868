"""Which part of a step's latent attention each program does: found by the program itself, from lengths on the device.

A unit is 64 query rows (tokens times heads) of one sequence; its work is the blocks of keys that they see, and an
overhead. The units of a step, laid end to end, are cut into as many equal parts as there are programs, wherever that
falls: a unit may be shared by several programs, and a program may have several units. Where a unit begins is a prefix
sum over lengths, which every program makes for itself; all else follows by arithmetic. Nothing is planned on the host
and nothing is launched before, so a recorded step stays right when lengths change.

A program shares at most its first and its last unit with others: two places for unfinished results are enough for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = 64
"""Query rows of a unit: the rows of a warpgroup's matrix instruction."""
KEYS = 64
"""Keys of a block: the cache's block."""
OVERHEAD = 4
"""What beginning a unit costs, in blocks: its queries are loaded and its result is written."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def blocks_of(starts, lengths, sequence, tile, HEADS: gl.constexpr, STEP: gl.constexpr):
    """Blocks of keys that a unit's rows see, rounded up to a multiple of STEP; 0 for a unit without rows."""
    count = gl.load(starts + sequence + 1) - gl.load(starts + sequence)
    length = gl.load(lengths + sequence)
    first = tile * 64 // HEADS
    last = gl.minimum((tile * 64 + 63) // HEADS + 1, count)
    keys = length - count + last
    return gl.where((first < count) & (length > 0), gl.cdiv(keys, 64 * STEP) * STEP, 0)


@gluon.jit
def part_of(
    starts, lengths, units, tiles,
    HEADS: gl.constexpr, STEP: gl.constexpr, BLOCK_UNITS: gl.constexpr, OVER: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """This program's share: its first unit, the unit behind its last, where its first and its last one begin, and a
    part's size.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    unit = gl.arange(0, BLOCK_UNITS, layout)
    inside = unit < units
    sequence = gl.where(inside, unit // tiles, 0)
    blocks = gl.where(inside, blocks_of(starts, lengths, sequence, unit % tiles, HEADS, STEP), 0)
    cost = gl.where(blocks > 0, blocks + OVER, 0)
    end = gl.associative_scan(cost, 0, _add)
    size = gl.maximum(gl.cdiv(gl.sum(cost, 0), gl.num_programs(0) * STEP) * STEP, STEP + OVER)
    low = gl.program_id(0) * size
    first = gl.sum(gl.where(inside & (end <= low), 1, 0), 0)
    behind = gl.sum(gl.where(inside & (end - cost + OVER < low + size), 1, 0), 0)
    begin = gl.max(gl.where(inside & (end <= low), end, 0), 0)
    last_begin = gl.max(gl.where(unit == behind - 1, end - cost, 0), 0)
    return first, behind, begin, last_begin, size


@gluon.jit
def share_of(me, begin, blocks, size, STEP: gl.constexpr, OVER: gl.constexpr):
    """Of a unit that begins at `begin`: the blocks `first` to `last` that fall to program `me`, the first program that
    has some of it, and how many have.
    """
    at = begin + OVER
    low = me * size - at
    first = gl.minimum(gl.maximum(gl.cdiv(low, STEP) * STEP, 0), blocks)
    last = gl.minimum(gl.maximum(gl.cdiv(low + size, STEP) * STEP, 0), blocks)
    owner = at // size
    sharers = (at + blocks - STEP) // size - owner + 1
    return first, last, owner, sharers
