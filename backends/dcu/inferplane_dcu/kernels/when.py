"""Where the vendor's kernels rank, and what they share."""

from __future__ import annotations

import functools
from typing import Any

import torch

from inferplane.plugin import Batch, When
from inferplane_dcu.vendor import VendorFunction

RANK_FUSED = 70
"""A fused function of the vendor's: below the band of kernels that somebody has measured, because we have not."""

HALF = (torch.bfloat16, torch.float16)


def with_(*functions: VendorFunction, features: tuple[str, ...] = (), **more: Any) -> When:
    """16-bit floats, where these functions and features are here."""
    return When(HALF, features=(*(f.feature for f in functions), *features), **more)


@functools.cache
def one(device: torch.device) -> torch.Tensor:
    """A scale of 1, which cache writes want even where nothing is scaled."""
    return torch.ones(1, dtype=torch.float32, device=device)


def only(result: Any) -> torch.Tensor:
    """The output of a function that may give the mass of the softmax (LSE) beside it: releases and paths differ."""
    return result[0] if isinstance(result, (tuple, list)) else result


def each_token_alone(batch: Batch, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths `[T]` and block tables `[T, blocks]`, int32, with every token as a sequence of its own that ends with it.

    The vendor's kernels for single tokens take one number of tokens for all sequences; a decode step may bring several
    for some. Sequences that are padding have length 0.
    """
    lens, tables = batch.seq_lens, batch.block_tables
    if batch.max_query_tokens == 1:
        return lens, tables
    sequence = torch.repeat_interleave(batch.query_start.diff().long(), output_size=tokens)
    behind = batch.query_start[1:][sequence] - 1 - torch.arange(tokens, dtype=torch.int32, device=lens.device)
    return (lens[sequence] - behind).clamp_min(0), tables[sequence]
