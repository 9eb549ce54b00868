"""The positions of the largest index scores, by a search over the scores' bits, eight at a time, without a sort.

Scores are compared as whole numbers. Programs share a row: each counts the digits of one chunk of its scores; the next
launch adds up the chunks' counts, which says in which digit the least chosen score lies, and goes on within that digit.
After four digits the least score is known, and how many of those that equal it are chosen: those of lower positions.
All sums are of whole numbers and nothing is counted in common, so a row's result depends on its scores alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.kv_write import with_contiguous_rows
from inferplane.kernels.triton.sparse.index_scores import score_keys
from inferplane.kernels.triton.tiles import Tiles
from inferplane.types import Batch, LayerKV

SCORE_BYTES = 256 << 20
"""Bytes of scores that are in memory at a time, unless one row has more."""
MOST_ROWS = 65535
"""Rows of a launch: GPUs have no larger grid in its second dimension."""
DIGITS = tl.constexpr(4)
BINS = tl.constexpr(256)
"""Values of a digit."""
BLOCK = 2048
"""Scores that a program holds at a time."""


@triton.jit
def comparable(scores):
    """float32 scores as uint32 in the same order; both zeros are equal, and all NaN, which are above infinity."""
    bits = (scores + 0.0).to(tl.uint32, bitcast=True)
    keys = tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)
    return tl.where(scores != scores, 0xFFFFFFFF, keys)


@triton.jit
def _number_seen(positions, row, stride):
    """The number of positions that a row of the step sees."""
    return tl.minimum(tl.load(positions + row) + 1, stride).to(tl.int32)


@triton.jit
def _find_digit(counts, state, used, DIGIT: tl.constexpr, TOP: tl.constexpr):
    """The digits of a row's least chosen score up to number DIGIT - 1, as one number; how many scores that have all of
    these digits are chosen; and the last digit alone.

    `counts` are those of digit number DIGIT - 1 in each of the row's `used` chunks, `state` holds the two numbers of
    each digit before.
    """
    bin = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for i in range(0, used):
        total += tl.load(counts + i * BINS + bin)
    prefix, left = tl.zeros([], tl.int64), tl.zeros([], tl.int64) + TOP
    if DIGIT > 1:
        prefix, left = tl.load(state + 2 * (DIGIT - 1)), tl.load(state + 2 * (DIGIT - 1) + 1)
    at_or_above = tl.sum(total, 0) - tl.cumsum(total, 0) + total
    digit = tl.sum((at_or_above >= left).to(tl.int32), 0) - 1
    over = tl.sum(tl.where(bin > digit, total, 0), 0)
    return prefix * BINS + digit, left - over, digit


@triton.jit(do_not_specialize=("first_row", "chunks"))
def _count_digits(
    scores, positions, before, counts, state, above, first_row, stride, chunks,
    TOP: tl.constexpr, DIGIT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program `(chunk, row)` counts digit number DIGIT of the scores in one chunk whose earlier digits are those of the
    least chosen score, in `counts` `[rows, chunks, BINS]`; `before` are those of the digit before.

    It adds to `above` `[rows, chunks]` how many scores of its chunk the digit before shows to be chosen, and the first
    program of a row stores what `_find_digit` found in `state` `[rows, DIGITS, 2]`.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    seen = _number_seen(positions, first_row + row, stride)
    first = chunk * CHUNK
    if (seen <= TOP) | (first >= seen):
        return
    bin = tl.arange(0, BINS)
    prefix = tl.zeros([], tl.int64)
    if DIGIT > 0:
        counted = before + row * chunks * BINS
        state += row * (DIGITS * 2)
        prefix, left, digit = _find_digit(counted, state, tl.cdiv(seen, CHUNK), DIGIT, TOP)
        if chunk == 0:
            tl.store(state + 2 * DIGIT, prefix)
            tl.store(state + 2 * DIGIT + 1, left)
        over = tl.sum(tl.where(bin > digit, tl.load(counted + chunk * BINS + bin), 0), 0)
        if DIGIT > 1:
            over += tl.load(above + row * chunks + chunk)
        tl.store(above + row * chunks + chunk, over)
    total = tl.zeros([BINS], tl.int32)
    for start in range(first, tl.minimum(first + CHUNK, seen), BLOCK):
        place = start + tl.arange(0, BLOCK)
        counts_here = place < seen
        key = comparable(tl.load(scores + row * stride + place, mask=counts_here, other=0.0))
        if DIGIT > 0:
            counts_here &= (key >> (32 - 8 * DIGIT)) == prefix.to(tl.uint32)
        total += tl.histogram(((key >> (24 - 8 * DIGIT)) & 0xFF).to(tl.int32), BINS, mask=counts_here)
    tl.store(counts + (row * chunks + chunk) * BINS + bin, total)


@triton.jit(do_not_specialize=("first_row", "chunks"))
def _store_positions(
    scores, positions, counts, state, above, out, first_row, stride, chunks,
    TOP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program `(chunk, row)` stores the positions of its chunk that are chosen, ascending; of a row that sees no more
    than TOP, all of them, then -1. `counts` are those of the last digit.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    seen = _number_seen(positions, first_row + row, stride)
    out += (first_row + row) * TOP
    first = chunk * CHUNK
    if seen <= TOP:
        for start in range(first, tl.minimum(first + CHUNK, TOP), BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(out + place, tl.where(place < seen, place, -1), mask=place < tl.minimum(first + CHUNK, TOP))
        return
    if first >= seen:
        return
    bin = tl.arange(0, BINS)
    counted = counts + row * chunks * BINS
    least, left, digit = _find_digit(counted, state + row * (DIGITS * 2), tl.cdiv(seen, CHUNK), DIGITS, TOP)
    over, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for i in range(0, chunk):  # what the chunks before this one store
        here = tl.load(counted + i * BINS + bin)
        over += tl.load(above + row * chunks + i) + tl.sum(tl.where(bin > digit, here, 0), 0)
        equal += tl.sum(tl.where(bin == digit, here, 0), 0)
    ties = left.to(tl.int32)
    stored = over + tl.minimum(equal, ties)
    ties -= equal
    for start in range(first, tl.minimum(first + CHUNK, seen), BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = (place < seen) & (place < first + CHUNK)
        key = comparable(tl.load(scores + row * stride + place, mask=inside, other=0.0))
        same = inside & (key == least.to(tl.uint32))
        chosen = (inside & (key > least.to(tl.uint32))) | (same & (tl.cumsum(same.to(tl.int32), 0) <= ties))
        order = tl.cumsum(chosen.to(tl.int32), 0)
        tl.store(out + stored + order - 1, place, mask=chosen)
        stored += tl.sum(chosen.to(tl.int32), 0)
        ties -= tl.sum(same.to(tl.int32), 0)


def choose_largest(
    scores: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, first_row: int, top: int, chunk: int
) -> None:
    """Store in rows of `out` the positions of the largest scores: the lower of equal ones, ascending, then -1.

    Args:
        scores: float32 `[R, stride]`; a row is read up to its own position.
        positions: `[T]`, of the step's tokens.
        out: int32 `[T, top]`; rows from `first_row` on are written, one for each row of scores.
        chunk: scores of a row that one program counts.
    """
    rows, stride = scores.shape
    chunks = triton.cdiv(stride, chunk)
    block = min(BLOCK, max(128, triton.next_power_of_2(chunk)))
    chunk = triton.cdiv(chunk, block) * block
    counts = scores.new_empty(2, rows, chunks, BINS.value, dtype=torch.int32)
    state = scores.new_empty(rows, DIGITS.value, 2, dtype=torch.int64)
    above = scores.new_empty(rows, chunks, dtype=torch.int32)
    if stride > top:
        for digit in range(DIGITS.value):
            _count_digits[(chunks, rows)](
                scores, positions, counts[1 - digit % 2], counts[digit % 2], state, above, first_row, stride, chunks,
                TOP=top, DIGIT=digit, CHUNK=chunk, BLOCK=block, num_warps=8,
            )  # fmt: skip
    _store_positions[(max(chunks, triton.cdiv(top, chunk)), rows)](
        scores, positions, counts[(DIGITS.value - 1) % 2], state, above, out, first_row, stride, chunks,
        TOP=top, CHUNK=chunk, BLOCK=block, num_warps=8,
    )  # fmt: skip


def index_select(view: Any, q: torch.Tensor, w: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `index_select`: scores, then a launch for each of four digits and one that stores positions, ascending;
    rows in parts whose scores fit `SCORE_BYTES`. If no sequence has more tokens than are chosen, nothing is scored.
    """
    tiles: Tiles = view.prepared
    q, w = with_contiguous_rows(q), with_contiguous_rows(w)
    tokens, top = q.shape[0], view.dims.top
    out = torch.empty(tokens, top, dtype=torch.int32, device=q.device)
    stride = triton.cdiv(batch.max_seq_tokens, 16) * 16
    step = max(1, min(SCORE_BYTES // (4 * stride), MOST_ROWS))
    for first in range(0, tokens, step):
        rows = range(first, min(first + step, tokens))
        if batch.max_seq_tokens > top:
            scores = score_keys(view, q, w, batch, kv, rows, stride)
        else:
            scores = w.new_empty(len(rows), min(stride, top))
        choose_largest(scores, batch.positions, out, first, top, tiles.select_tokens)
    return out
