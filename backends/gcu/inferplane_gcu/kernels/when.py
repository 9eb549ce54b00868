"""Where the vendor's kernels rank, and what they share."""

from __future__ import annotations

import functools

import torch

RANK_FUSED = 70
"""A fused operator of the vendor's: below the band of kernels that somebody has measured, because we have not."""

HALF = (torch.bfloat16, torch.float16)
OPERATORS, FLASH = ("vllm-gcu",), ("flash-attn",)
"""Features: the operators of vllm-gcu's extension, and Enflame's build of flash attention."""


@functools.cache
def one(device: torch.device) -> torch.Tensor:
    """A scale of 1, which cache writes want even where nothing is scaled."""
    return torch.ones(1, dtype=torch.float32, device=device)
