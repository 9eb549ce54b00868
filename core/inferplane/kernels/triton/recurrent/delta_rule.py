"""The gated delta rule in a decode step: a head's state, divided by columns, stays in registers for all its tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.recurrent.sequences import find_rows
from inferplane.ops.recurrent.delta_rule import NORM_EPS
from inferplane.types import Batch

COLUMNS = 32
"""Columns of a program's share of a state: 128 rows of them are 32 registers a thread."""


@triton.jit
def _gated_delta_rule(
    q, k, v, decay, beta, state, out, after, starts, slots, lengths, scale, eps,
    q_outer, q_inner, k_outer, k_inner, v_outer, v_inner, decay_outer, beta_outer,
    HEADS: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    MOST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program `(columns, head, sequence)`: results and new state of COLUMNS columns of a head's `[K, V]`. SHARED heads
    have the same q and k.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real, inside = row < K, column < V
    begin, count, is_read = find_rows(starts, slots, lengths, sequence, MOST)
    place = (sequence.to(tl.int64) * HEADS + head) * (K * V) + row[:, None] * V + column[None, :]
    whole = real[:, None] & inside[None, :]
    s = tl.load(state + place, mask=whole & (row[:, None] * 0 + is_read > 0), other=0.0)
    for t in range(count):
        token = begin + t
        query = tl.load(q + token * q_outer + head // SHARED * q_inner + row, mask=real, other=0.0).to(tl.float32)
        key = tl.load(k + token * k_outer + head // SHARED * k_inner + row, mask=real, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_outer + head * v_inner + column, mask=inside, other=0.0).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
        key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
        s *= tl.exp(tl.load(decay + token * decay_outer + head))
        recalled = tl.sum(key[:, None] * s, 0)
        s += key[:, None] * (tl.load(beta + token * beta_outer + head) * (value - recalled))[None, :]
        y = tl.sum(query[:, None] * s, 0)
        tl.store(out + (token * HEADS + head) * V + column, y.to(out.dtype.element_ty), mask=inside)
    tl.store(after + place, s, mask=whole)


def gated_delta_rule(
    view: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    batch: Batch,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `gated_delta_rule` in a decode step, by one launch, token by token: `[T, H, V]`, and the states float32
    `[B, H, K, V]` after the step.
    """
    q, k, v, decay, beta = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v, decay, beta))
    state = state.contiguous()
    (groups, heads), (k_dim, v_dim) = view.heads, view.dims
    out, after = v.new_empty(v.shape), torch.empty_like(state)
    columns = min(COLUMNS, triton.next_power_of_2(v_dim))
    if len(state):
        _gated_delta_rule[(triton.cdiv(v_dim, columns), heads, len(state))](
            q, k, v, decay, beta, state, out, after, batch.query_start, batch.slots, batch.seq_lens,
            k_dim**-0.5, NORM_EPS, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            decay.stride(0), beta.stride(0), HEADS=heads, SHARED=heads // groups, K=k_dim, V=v_dim,
            MOST=triton.next_power_of_2(batch.max_query_tokens), ROWS=triton.next_power_of_2(k_dim), COLUMNS=columns,
            num_warps=4,
        )  # fmt: skip
    return out, after
