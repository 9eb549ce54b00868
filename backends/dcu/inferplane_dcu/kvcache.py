"""KV layouts on Hygon DCUs: core's paged storage in blocks of 64 tokens."""

from __future__ import annotations

from inferplane.plugin import KVLayout, paged_layout

BLOCK_TOKENS = 64
"""The vendor's flash_attn takes blocks of 64 or 128 tokens, its flash_mla 64 (HYGON-AI/vllm-plugin-das)."""


def layouts() -> tuple[KVLayout, ...]:
    """Every layout on offer, the plan's own dtype first."""
    return tuple(paged_layout(BLOCK_TOKENS, kv_dtype) for kv_dtype in ("auto", "int8"))
