"""KV layouts on Kunlun cards: core's paged storage, in blocks of the size that the vendor's attention takes."""

from __future__ import annotations

from inferplane.plugin import KVLayout, KVRequest, paged_layout

BLOCK_TOKENS = 16
LATENT_BLOCK_TOKENS = 64
"""Kunlun's FlashMLA takes no other block size; its other attention is run with 16 (vllm_kunlun/platforms/kunlun.py)."""


def layouts(request: KVRequest) -> tuple[KVLayout, ...]:
    """Every layout on offer for one kind of layer, the plan's own dtype first."""
    tokens = LATENT_BLOCK_TOKENS if request.kind == "mla" else BLOCK_TOKENS
    return tuple(paged_layout(tokens, kv_dtype) for kv_dtype in ("auto", "int8"))
