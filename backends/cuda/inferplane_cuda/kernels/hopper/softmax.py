"""What every Hopper kernel of attention does between its two products, and about keys that are nobody's."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

UNSEEN = gl.constexpr(-1.0e30)
"""A score that no key has: finite, so that a row that has seen nothing yet needs no special case. Whatever such a row
adds up is wiped by the first real score, or weighs 2^-1e30 among the parts of its unit.
"""


@gluon.jit
def weigh(s, highest, total):
    """Weights of scores `s` (in powers of two), by what the results so far shrink, and the new maxima and sums."""
    higher = gl.maximum(highest, gl.max(s, 1))
    shrink = gl.exp2(highest - higher)
    p = gl.exp2(s - higher[:, None])
    return p, shrink, higher, total * shrink + gl.sum(p, 1)


@gluon.jit
def wipe(values, behind, layout: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zero the rows of `values` from `behind` on. A weight of 0 does not keep them out: what lies there is somebody
    else's and may be NaN. Every warp that multiplies by them does this; rows before `behind` are stored as they are.
    """
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    for part in gl.static_range(COLUMNS // 64):
        piece = values.slice(part * 64, 64, dim=1)
        x = piece.load(layout)
        piece.store(gl.where((row < behind)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
