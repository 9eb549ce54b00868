"""KV layouts of the cpu backend: core's paged storage in small blocks, plain or quantized."""

from __future__ import annotations

import math

import torch

from inferplane.plugin import KVLayout, KVRequest, list_kv_dtypes, paged_layout
from inferplane_cpu import huge_pages

BLOCK_TOKENS = 16
"""Small, because a partly filled block is wasted memory and the host gathers blocks of any size equally well."""
COMPRESSED_BLOCK_TOKENS = 32
"""Of models with compressed entries: a block has one entry at least, also where that stands for 128 tokens. In blocks
of 16 tokens those of DeepSeek-V4 would take 1.20 times what they hold, in those of 32 1.08 times. In larger ones rows
of compressors, of which 8 tokens are needed, take more."""
COMPRESSED_KINDS = ("shared_kv", "compressor_rows", "index_rows")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros on huge pages, each of which the system zeroes when it is touched: an unused cache costs nothing."""
    return huge_pages.zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


IN_SPANS = ("int4", "k8v4")
"""KV dtypes of 4 bits, whose entries native attention multiplies as they lie, if the processor has VNNI."""
GROUPED = KVRequest("gqa", 1, 64, 64)


def layouts(request: KVRequest = GROUPED) -> tuple[KVLayout, ...]:
    """Every layout on offer for what a layer requests, the plan's own dtype first. Entries of 4 bits lie in spans, as
    products of bytes read them, if they are whole groups."""
    is_compressed = request.rate > 1 or request.kind in COMPRESSED_KINDS
    block_tokens = COMPRESSED_BLOCK_TOKENS if is_compressed else BLOCK_TOKENS
    whole = request.kind == "gqa" and request.dim % 32 == 0 and request.v_dim % 32 == 0
    return tuple(
        paged_layout(block_tokens, kv_dtype, in_spans=whole and kv_dtype in IN_SPANS, zeros=_zeros)
        for kv_dtype in list_kv_dtypes(request)
    )
