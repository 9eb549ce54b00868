"""KV layouts on Enflame GCUs: blocks of 64 tokens.

In the plan's own dtype core's paged storage is what the vendor reads: K and V `[blocks, 64, heads, D]` for flash
attention, latents `[blocks, 64, 576]` for FlashMLA. The storage keeps one slot more behind the blocks, unseen by them.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9, vllm_gcu/gcu.py and attention/backends/flash_attn.py, mla_v1.py.
"""

from __future__ import annotations

from inferplane.plugin import KVLayout, paged_layout

BLOCK_TOKENS = 64
"""What vllm-gcu chooses by default (vllm_gcu/gcu.py, check_and_update_config)."""

PAGED = "paged_64"


def layouts() -> tuple[KVLayout, ...]:
    """Every layout on offer, the plan's own dtype first."""
    return tuple(paged_layout(BLOCK_TOKENS, kv_dtype) for kv_dtype in ("auto", "int8"))
