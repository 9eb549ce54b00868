"""What every Hopper attention kernel does between its two products, and with keys beyond a sequence's end."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

UNSEEN = gl.constexpr(-1.0e30)
"""Score of a masked key: finite, so that a row that has seen no key yet needs no special case. What such a row has
summed is multiplied by 0 at the first real score, or weighs 2^-1e30 among the parts of its unit.
"""


@gluon.jit
def softmax_step(s, highest, total):
    """One step of an online softmax over scores `s`, in powers of two: their weights, the factor by which earlier sums
    shrink, and the new maxima and sums.
    """
    higher = gl.maximum(highest, gl.max(s, 1))
    shrink = gl.exp2(highest - higher)
    p = gl.exp2(s - higher[:, None])
    return p, shrink, higher, total * shrink + gl.sum(p, 1)


@gluon.jit
def zero_rows_from(values, end, layout: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zero the rows of `values` from `end` on: a weight of 0 does not keep them out, since entries of other requests
    there may be NaN. Every warp that multiplies by them does this; rows before `end` are stored as they are.
    """
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    for part in gl.static_range(COLUMNS // 64):
        piece = values.slice(part * 64, 64, dim=1)
        x = piece.load(layout)
        piece.store(gl.where((row < end)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
