"""KV layouts of the cpu backend: core's paged storage in small blocks, plain or quantized."""

from __future__ import annotations

from inferplane.plugin import KVLayout, paged_layout

BLOCK_TOKENS = 16
"""Small, because a partly filled block is wasted memory and the host gathers blocks of any size equally well."""


def layouts() -> tuple[KVLayout, ...]:
    """Every layout on offer, the plan's own dtype first."""
    return tuple(paged_layout(BLOCK_TOKENS, kv_dtype) for kv_dtype in ("auto", "fp8", "int8"))
