"""KV layouts on Ascend NPUs: core's paged storage in blocks of 128 tokens."""

from __future__ import annotations

from inferplane.plugin import KVLayout, paged_layout

BLOCK_TOKENS = 128
"""The paged form of the vendor's fused attention takes no other size in vllm-ascend (attention_v1.py)."""


def layouts() -> tuple[KVLayout, ...]:
    """Every layout on offer, the plan's own dtype first."""
    return tuple(paged_layout(BLOCK_TOKENS, kv_dtype) for kv_dtype in ("auto", "int8"))
