"""Lengths as the vendor's attention wants them, on the host and on the card at once, made once a step.

The host's tensors are named `_cpu`, the card's `_xpu`, as the vendor does. A step's batch is one object in all layers,
so what was made for it last is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch

from inferplane.plugin import Batch

Made = TypeVar("Made")


def once_a_batch(make: Callable[[Batch], Made]) -> Callable[[Batch], Made]:
    """`make`, called again only for another batch than the last one."""
    last: tuple[weakref.ref[Batch], Made] | None = None

    def made(batch: Batch) -> Made:
        nonlocal last
        known = last  # another thread may put its own there at any time
        if known is None or known[0]() is not batch:
            known = last = weakref.ref(batch), make(batch)
        return known[1]

    return made


class Sequences(NamedTuple):
    """Sequences with a token each.

    Args:
        lens_cpu, lens_xpu: int32 `[n]`, tokens of each, its own included.
        tables: int32 `[n, blocks]`, contiguous.
    """

    lens_cpu: torch.Tensor
    lens_xpu: torch.Tensor
    tables: torch.Tensor


def _sequence_a_token(batch: Batch) -> Sequences:
    """Each query token as a sequence that ends with it. A padded one reads one token of what its table names: what a
    length of 0 does is written nowhere.
    """
    lens, tables, known = batch.seq_lens, batch.block_tables, batch.lens()
    ends = list(known.seq_lens)
    if batch.max_query_tokens > 1:
        rows = [(i, a) for i, (a, b) in enumerate(zip(known.query_start, known.query_start[1:])) for a in range(a, b)]
        ends = [known.seq_lens[i] - (known.query_start[i + 1] - 1 - row) for i, row in rows]
        tables = tables[torch.tensor([i for i, _ in rows], device=tables.device)]
        lens = torch.tensor(ends, dtype=torch.int32).to(lens.device)
    lens_cpu = torch.tensor(ends, dtype=torch.int32).clamp_min(1)
    return Sequences(lens_cpu, lens.clamp_min(1), tables.contiguous())


class Lods(NamedTuple):
    """Where sequences start among query tokens, and among all tokens: running sums from 0 on, int32 `[n + 1]`."""

    query_cpu: torch.Tensor
    query_xpu: torch.Tensor
    kv_cpu: torch.Tensor
    kv_xpu: torch.Tensor


def _lods(batch: Batch) -> Lods:
    known, device = batch.lens(), batch.seq_lens.device
    query = torch.tensor(known.query_start, dtype=torch.int32)
    kv = torch.tensor([0, *accumulate(known.seq_lens)], dtype=torch.int32)
    return Lods(query, batch.query_start, kv, kv.to(device))


sequence_per_token = once_a_batch(_sequence_a_token)
lods = once_a_batch(_lods)
