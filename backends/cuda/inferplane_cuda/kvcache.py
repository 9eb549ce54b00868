"""KV layouts on NVIDIA GPUs: core's paged storage in blocks of 64 tokens."""

from __future__ import annotations

from inferplane.plugin import KVLayout, KVRequest, paged_layout

BLOCK_TOKENS = 64
"""FlashMLA takes no other block size, and FlashAttention-3 and FlashInfer take this one too."""


def layouts(request: KVRequest) -> tuple[KVLayout, ...]:
    """Layouts offered for one kind of layer. Pure."""
    return (paged_layout(BLOCK_TOKENS),)
