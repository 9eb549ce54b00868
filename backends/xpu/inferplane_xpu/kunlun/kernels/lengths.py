"""Lengths as the vendor's attention takes them, on the host and on the card at once, computed once per step.

As in the vendor's code, tensors on the host are named `_cpu` and those on the card `_xpu`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from inferplane.plugin import Batch


class SingleTokenSequences(NamedTuple):
    """Sequences with a token each.

    Args:
        lens_cpu, lens_xpu: int32 `[n]`, tokens of each, its own included.
        tables: int32 `[n, blocks]`, contiguous.
    """

    lens_cpu: torch.Tensor
    lens_xpu: torch.Tensor
    tables: torch.Tensor


def sequence_per_token(batch: Batch) -> SingleTokenSequences:
    """Each query token as a sequence that ends with it, computed once per step.

    A padded token reads one token of the blocks in its table: no document says what a length of 0 does.
    """
    return batch.once("inferplane_xpu.kunlun.sequence_per_token", lambda: _sequence_per_token(batch))


def _sequence_per_token(batch: Batch) -> SingleTokenSequences:
    lens, tables, known = batch.seq_lens, batch.block_tables, batch.lens()
    lengths = list(known.seq_lens)
    if batch.max_query_tokens > 1:
        rows = [(i, a) for i, (a, b) in enumerate(zip(known.query_start, known.query_start[1:])) for a in range(a, b)]
        lengths = [known.seq_lens[i] - (known.query_start[i + 1] - 1 - row) for i, row in rows]
        tables = tables[torch.tensor([i for i, _ in rows], device=tables.device)]
        lens = torch.tensor(lengths, dtype=torch.int32).to(lens.device)
    lens_cpu = torch.tensor(lengths, dtype=torch.int32).clamp_min(1)
    return SingleTokenSequences(lens_cpu, lens.clamp_min(1), tables.contiguous())


class Lods(NamedTuple):
    """Where sequences start among query tokens, and among all tokens: running sums from 0 on, int32 `[n + 1]`."""

    query_cpu: torch.Tensor
    query_xpu: torch.Tensor
    kv_cpu: torch.Tensor
    kv_xpu: torch.Tensor


def lods(batch: Batch) -> Lods:
    """The running sums of a step, computed once."""
    return batch.once("inferplane_xpu.kunlun.lods", lambda: _compute_lods(batch))


def _compute_lods(batch: Batch) -> Lods:
    known, device = batch.lens(), batch.seq_lens.device
    query = torch.tensor(known.query_start, dtype=torch.int32)
    kv = torch.tensor([0, *accumulate(known.seq_lens)], dtype=torch.int32)
    return Lods(query, batch.query_start, kv, kv.to(device))
