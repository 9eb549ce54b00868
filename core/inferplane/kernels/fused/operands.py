"""Operands of vendors' operators, and room for their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from inferplane.plugin import Batch


@functools.cache
def one(device: torch.device) -> torch.Tensor:
    """A scale of 1, which cache writes want even where nothing is scaled."""
    return torch.ones(1, dtype=torch.float32, device=device)


def rotate_last_head_as_key(x: torch.Tensor, rotate: Callable[[torch.Tensor, torch.Tensor], object]) -> torch.Tensor:
    """Heads `[T, H, D]`, rotated by an operator that rotates queries and keys at once: the last head goes as the key.

    Args:
        x: left as it is.
        rotate: rotates the others `[T, (H - 1) D]` and the last `[T, D]` in place. One head goes as both.
    """
    tokens, heads, _ = x.shape
    last = x[:, -1].clone(memory_format=torch.contiguous_format)
    rest = x[:, : max(1, heads - 1)].clone(memory_format=torch.contiguous_format)
    rotate(rest.view(tokens, -1), last)
    return torch.cat((rest, last[:, None]), 1) if heads > 1 else rest


def one_sequence_per_token(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths `[T]` and block tables `[T, blocks]`, int32, with every token as a sequence of its own that ends with it.

    For kernels of single tokens that take one number of tokens for all sequences: a decode step may bring several for
    some. Sequences that are padding have length 0. Nothing waits for the device.
    """
    lens, tables = batch.seq_lens, batch.block_tables
    if batch.max_query_tokens == 1:
        return lens, tables
    sequence = torch.repeat_interleave(batch.query_start.diff().long(), output_size=batch.tokens)
    behind = batch.query_start[1:][sequence] - 1 - torch.arange(batch.tokens, dtype=torch.int32, device=lens.device)
    return (lens[sequence] - behind).clamp_min(0), tables[sequence]


def cumulative_lengths(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where sequences that lie one behind the other start, and where the last ends: int32 `[B + 1]`."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(device)


def allocate_routing(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, float32, and ids, int32, both `[T, top_k]` and not yet written."""
    weights = logits.new_empty(logits.shape[0], top_k, dtype=torch.float32)
    return weights, torch.empty_like(weights, dtype=torch.int32)
