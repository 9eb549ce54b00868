"""KV layouts on Enflame GCUs: core's paged storage in blocks of 64 tokens."""

from __future__ import annotations

from inferplane.plugin import KVLayout, KVRequest, paged_layout

BLOCK_TOKENS = 64
"""What vllm-gcu chooses when nothing is asked for (vllm_gcu/gcu.py, check_and_update_config)."""


def layouts(request: KVRequest) -> tuple[KVLayout, ...]:
    """Layouts offered for one kind of layer. Pure."""
    return (paged_layout(BLOCK_TOKENS),)
