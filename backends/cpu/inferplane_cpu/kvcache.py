"""KV layouts of the cpu backend: core's paged storage in small blocks, plain or quantized."""

from __future__ import annotations

import math

import torch

from inferplane.plugin import KVLayout, KVRequest, list_kv_dtypes, paged_layout
from inferplane_cpu import huge_pages

BLOCK_TOKENS = 16
"""Small, because a partly filled block is wasted memory and the host gathers blocks of any size equally well."""


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros on huge pages, each of which the system zeroes when it is touched: an unused cache costs nothing."""
    return huge_pages.zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


GROUPED = KVRequest("gqa", 1, 64, 64)


def layouts(request: KVRequest = GROUPED) -> tuple[KVLayout, ...]:
    """Every layout on offer for what a layer requests, the plan's own dtype first."""
    return tuple(paged_layout(BLOCK_TOKENS, kv_dtype, zeros=_zeros) for kv_dtype in list_kv_dtypes(request))
