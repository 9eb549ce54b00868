"""KV layouts on Ascend NPUs: core's paged storage in blocks of 128 tokens."""

from __future__ import annotations

from inferplane.plugin import KVLayout, KVRequest, paged_layout

BLOCK_TOKENS = 128
"""The paged form of the vendor's fused attention takes no other size in vllm-ascend (attention_v1.py)."""


def layouts(request: KVRequest) -> tuple[KVLayout, ...]:
    """Layouts offered for one kind of layer. Pure."""
    return (paged_layout(BLOCK_TOKENS),)
