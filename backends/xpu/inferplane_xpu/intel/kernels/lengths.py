"""Sequences as the vendor's attention for single tokens wants them, made once a step.

A step's batch is one object in all layers, so what was made for it last is kept. While a graph is recorded it is made
anew: a graph that did not hold the making would replay the lengths of the batch that it was warmed up with.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from inferplane.kernels.fused.operands import each_token_alone
from inferplane.plugin import Batch


class Sequences(NamedTuple):
    """What attention reads of a batch: int32 offsets `[B + 1]`, lengths `[B]`, tables `[B, blocks]`, largest sizes."""

    query_start: torch.Tensor
    lens: torch.Tensor
    tables: torch.Tensor
    max_query_tokens: int
    max_seq_tokens: int


class _Made(NamedTuple):
    batch: weakref.ref[Batch]
    groups: int
    recorded: bool
    sequences: Sequences


_last: _Made | None = None


def single_tokens(batch: Batch, groups: int = 1) -> Sequences:
    """Each token as a sequence of its own that ends with it; `groups` of them, one behind the other, where its heads
    are too many for one.
    """
    if batch.max_query_tokens == groups == 1:
        return Sequences(batch.query_start, batch.seq_lens, batch.block_tables, 1, batch.max_seq_tokens)
    global _last
    recorded = _recording()
    known = _last  # another thread may put its own there at any time
    if known is None or known.batch() is not batch or (known.groups, known.recorded) != (groups, recorded):
        known = _last = _Made(weakref.ref(batch), groups, recorded, _make(batch, groups))
    return known.sequences


def _make(batch: Batch, groups: int) -> Sequences:
    lens, tables = each_token_alone(batch)
    if groups > 1:
        lens, tables = lens.repeat_interleave(groups), tables.repeat_interleave(groups, 0)
    starts = torch.arange(batch.tokens * groups + 1, dtype=torch.int32, device=lens.device)
    return Sequences(starts, lens, tables, 1, batch.max_seq_tokens)


def _recording() -> bool:
    return torch.xpu.is_initialized() and bool(torch.xpu.is_current_stream_capturing())
