"""Putting together the units that several programs shared."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine(
    parts, masses, meta, out, starts, lengths, tiles,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program a row: sum its parts with the weights of their masses. A unit of one part is in `out` already."""
    sequence, row = tl.program_id(1), tl.program_id(0)
    begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - begin
    if (row // HEADS >= count) | (tl.load(lengths + sequence) == 0):
        return
    unit = sequence * tiles + row // 64
    sharers = tl.load(meta + 2 * unit + 1)
    if sharers == 1:
        return
    owner = tl.load(meta + 2 * unit)
    column = tl.arange(0, WIDTH)
    within = row % 64
    highest = tl.load(masses + (2 * owner + 1) * 64 + within)
    acc = tl.load(parts + ((2 * owner + 1) * 64 + within).to(tl.int64) * WIDTH + column)
    total = 1.0
    for program in range(owner + 1, owner + sharers):
        mass = tl.load(masses + 2 * program * 64 + within)
        higher = tl.maximum(highest, mass)
        shrink, weight = tl.exp2(highest - higher), tl.exp2(mass - higher)
        part = tl.load(parts + (2 * program * 64 + within).to(tl.int64) * WIDTH + column)
        acc = acc * shrink + part * weight
        total = total * shrink + weight
        highest = higher
    place = (begin * HEADS + row).to(tl.int64) * WIDTH + column
    tl.store(out + place, (acc / total).to(tl.bfloat16))
