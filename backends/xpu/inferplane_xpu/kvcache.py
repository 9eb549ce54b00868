"""KV layouts of family "xpu": core's paged storage, in blocks of the size that each vendor's attention takes."""

from __future__ import annotations

from inferplane.plugin import KVLayout, KVRequest, paged_layout

INTEL_BLOCK_TOKENS = 64
"""vllm-xpu-kernels takes 16, 32 or 64."""

KUNLUN_BLOCK_TOKENS = 16
KUNLUN_LATENT_BLOCK_TOKENS = 64
"""Kunlun's FlashMLA takes no other block size; its other attention is run with 16 (vllm_kunlun/platforms/kunlun.py)."""


def intel_layouts() -> tuple[KVLayout, ...]:
    """Every layout on offer on Intel GPUs, the plan's own dtype first."""
    return _paged(INTEL_BLOCK_TOKENS)


def kunlun_layouts(request: KVRequest) -> tuple[KVLayout, ...]:
    """Every layout on offer for one kind of layer on Kunlun cards, the plan's own dtype first."""
    return _paged(KUNLUN_LATENT_BLOCK_TOKENS if request.kind == "mla" else KUNLUN_BLOCK_TOKENS)


def _paged(block_tokens: int) -> tuple[KVLayout, ...]:
    return tuple(paged_layout(block_tokens, kv_dtype) for kv_dtype in ("auto", "int8"))
