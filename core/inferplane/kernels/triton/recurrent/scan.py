"""The selective scan in a decode step: a head's state, divided by rows, stays in registers for all its tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.recurrent.sequences import find_rows, softplus
from inferplane.types import Batch

ROWS = 32
"""Rows of a program's share of a state: 128 columns of them are 32 registers a thread."""


@triton.jit
def _selective_scan(
    x, dt, b, c, state, a_log, dt_bias, skip, out, after, starts, slots, lengths, least, largest,
    x_outer, x_inner, dt_outer, b_outer, b_inner, c_outer, c_inner,
    HEADS: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    MOST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program `(rows, head, sequence)`: results and new state of ROWS rows of a head's `[P, N]`. SHARED heads have the
    same b and c.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside, real = row < P, column < N
    begin, count, is_read = find_rows(starts, slots, lengths, sequence, MOST)
    place = (sequence.to(tl.int64) * HEADS + head) * (P * N) + row[:, None] * N + column[None, :]
    whole = inside[:, None] & real[None, :]
    s = tl.load(state + place, mask=whole & (row[:, None] * 0 + is_read > 0), other=0.0)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    for t in range(count):
        token = begin + t
        step = softplus(tl.load(dt + token * dt_outer + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32))
        step = tl.maximum(step, least, propagate_nan=tl.PropagateNan.ALL)
        step = tl.minimum(step, largest, propagate_nan=tl.PropagateNan.ALL)
        value = tl.load(x + token * x_outer + head * x_inner + row, mask=inside, other=0.0).to(tl.float32)
        into = tl.load(b + token * b_outer + head // SHARED * b_inner + column, mask=real, other=0.0).to(tl.float32)
        read = tl.load(c + token * c_outer + head // SHARED * c_inner + column, mask=real, other=0.0).to(tl.float32)
        s = s * tl.exp(-rate * step) + (value * step)[:, None] * into[None, :]
        y = tl.sum(s * read[None, :], 1) + value * tl.load(skip + head).to(tl.float32)
        tl.store(out + (token * HEADS + head) * P + row, y.to(out.dtype.element_ty), mask=inside)
    tl.store(after + place, s, mask=whole)


def selective_scan(
    view: Any,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    batch: Batch,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `selective_scan` in a decode step, by one launch, token by token: `[T, H, P]`, and the states float32
    `[B, H, P, N]` after the step.
    """
    x, dt, b, c = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, dt, b, c))
    state = state.contiguous()
    heads, dim, size = x.shape[1], view.head_dim, view.state_size
    out, after = x.new_empty(x.shape), torch.empty_like(state)
    rows = min(ROWS, triton.next_power_of_2(dim))
    if len(state):
        _selective_scan[(triton.cdiv(dim, rows), heads, len(state))](
            x, dt, b, c, state, view.a_log, view.dt_bias, view.skip, out, after, batch.query_start, batch.slots,
            batch.seq_lens, *view.dt_limits, x.stride(0), x.stride(1), dt.stride(0), b.stride(0), b.stride(1),
            c.stride(0), c.stride(1), HEADS=heads, SHARED=heads // view.groups, P=dim, N=size,
            MOST=triton.next_power_of_2(batch.max_query_tokens), ROWS=rows, COLUMNS=triton.next_power_of_2(size),
            num_warps=4,
        )  # fmt: skip
    return out, after
