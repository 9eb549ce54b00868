"""Arguments that vendors' operators take: lengths, block tables, scales, tensors for their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from inferplane.plugin import Batch
from inferplane.renamed import old_names_of_module


@functools.cache
def unit_scale(device: torch.device) -> torch.Tensor:
    """A scale of 1, `[1]` float32, which operators of cache writes take even where nothing is scaled. One tensor per
    device, made at the first call; never write into it.
    """
    return torch.ones(1, dtype=torch.float32, device=device)


def rotate_last_head_as_key(x: torch.Tensor, rotate: Callable[[torch.Tensor, torch.Tensor], object]) -> torch.Tensor:
    """Rotate heads by an operator that rotates queries and keys at once: pass the last head as the key.

    Args:
        x: heads `[T, H, D]`, left unchanged.
        rotate: rotates the first H - 1 heads `[T, (H - 1) D]` and the last head `[T, D]` in place. If H is 1, it gets
            two copies of the one head.

    Returns:
        The rotated heads `[T, H, D]`.
    """
    tokens, heads, _ = x.shape
    last = x[:, -1].clone(memory_format=torch.contiguous_format)
    rest = x[:, : max(1, heads - 1)].clone(memory_format=torch.contiguous_format)
    rotate(rest.view(tokens, -1), last)
    return torch.cat((rest, last[:, None]), 1) if heads > 1 else rest


def one_sequence_per_token(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Present every query token as a sequence of its own that ends with it: lengths `[T]`, block tables `[T, blocks]`.

    Both are int32. For decode kernels that take one query token per sequence, since a decode step may bring several
    for some sequences. Sequences that are padding get length 0. Nothing waits for the device.
    """
    lens, tables = batch.seq_lens, batch.block_tables
    if batch.max_query_tokens == 1:
        return lens, tables
    sequence = torch.repeat_interleave(batch.query_start.diff().long(), output_size=batch.tokens)
    behind = batch.query_start[1:][sequence] - 1 - torch.arange(batch.tokens, dtype=torch.int32, device=lens.device)
    return (lens[sequence] - behind).clamp_min(0), tables[sequence]


def cumulative_lengths(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where each of B concatenated sequences starts, and where the last one ends: int32 `[B + 1]` on the device, from
    lengths on the host.
    """
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(device)


def allocate_routing(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """New tensors, not initialized, for a routing operator to write its results into: weights float32 and expert ids
    int32, both `[T, top_k]`.

    Args:
        logits: the router's, `[T, experts]`; they give T and the device.
        top_k: experts per token.
    """
    weights = logits.new_empty(logits.shape[0], top_k, dtype=torch.float32)
    return weights, torch.empty_like(weights, dtype=torch.int32)


__getattr__ = old_names_of_module(
    __name__,
    {
        "one": "unit_scale",
        "last_head_as_key": "rotate_last_head_as_key",
        "each_token_alone": "one_sequence_per_token",
        "running_sum": "cumulative_lengths",
        "room_for_routes": "allocate_routing",
    },
)
