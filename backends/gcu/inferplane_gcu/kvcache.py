"""KV layouts on Enflame GCUs: core's paged storage in blocks of 64 tokens."""

from __future__ import annotations

from inferplane.plugin import KVLayout, paged_layout

BLOCK_TOKENS = 64
"""What vllm-gcu chooses when nothing is asked for (vllm_gcu/gcu.py, check_and_update_config)."""


def layouts() -> tuple[KVLayout, ...]:
    """Every layout on offer, the plan's own dtype first."""
    return tuple(paged_layout(BLOCK_TOKENS, kv_dtype) for kv_dtype in ("auto", "int8"))
