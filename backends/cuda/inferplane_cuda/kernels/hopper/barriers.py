"""Barriers between the loading warp and the computing warps, and how many keys a row sees."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def make_barriers(N: gl.constexpr, ARRIVALS: gl.constexpr):
    """N barriers in shared memory; a phase of a barrier ends after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def key_limits(starts, lengths, sequence, tile, row, HEADS: gl.constexpr):
    """How many keys each row of a unit sees, and how many keys the sequence has."""
    count = gl.load(starts + sequence + 1) - gl.load(starts + sequence)
    length = gl.load(lengths + sequence)
    return gl.minimum(length - count + (tile * 64 + row) // HEADS + 1, length), length
