"""Sequences in the form that the vendor's attention for single tokens takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from inferplane.kernels.fused.operands import one_sequence_per_token
from inferplane.plugin import Batch


class AttentionSequences(NamedTuple):
    """What attention reads of a batch: int32 offsets `[B + 1]`, lengths `[B]`, tables `[B, blocks]`, largest sizes."""

    query_start: torch.Tensor
    lens: torch.Tensor
    tables: torch.Tensor
    max_query_tokens: int
    max_seq_tokens: int


def single_tokens(batch: Batch, groups: int = 1) -> AttentionSequences:
    """Each token as a sequence of its own that ends with it, computed once per step.

    Args:
        groups: consecutive copies of each sequence, for kernels that take only some of a token's heads per sequence.
    """
    if batch.max_query_tokens == groups == 1:
        return AttentionSequences(batch.query_start, batch.seq_lens, batch.block_tables, 1, batch.max_seq_tokens)
    return batch.once(("inferplane_xpu.intel.single_tokens", groups), lambda: _single_tokens(batch, groups))


def _single_tokens(batch: Batch, groups: int) -> AttentionSequences:
    lens, tables = one_sequence_per_token(batch)
    if groups > 1:
        lens, tables = lens.repeat_interleave(groups), tables.repeat_interleave(groups, 0)
    starts = torch.arange(batch.tokens * groups + 1, dtype=torch.int32, device=lens.device)
    return AttentionSequences(starts, lens, tables, 1, batch.max_seq_tokens)
