"""A sequence's rows in a decode step, as the kernels of recurrent layers find them on the device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_rows(starts, slots, lengths, sequence, MOST: tl.constexpr):
    """Where a sequence's rows begin, how many of them are no padding (slot -1, which comes last), and a number above 0
    if its state is read: that of a sequence that begins in this step is zero before it, whatever is stored; that of a
    padded sequence stays. MOST: a power of two, at least the number of rows.
    """
    begin = tl.load(starts + sequence)
    row = tl.arange(0, MOST)
    mine = row < tl.load(starts + sequence + 1) - begin
    slot = tl.load(slots + begin + row, mask=mine, other=-1)
    count = tl.sum((slot >= 0).to(tl.int32), 0)
    return begin.to(tl.int64), count, tl.where(count == 0, 1, tl.load(lengths + sequence) - count)


@triton.jit
def softplus(x):
    """`log(1 + exp(x))` of float32 entries, without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
