"""KV layouts on Intel GPUs: core's paged storage, in blocks of the size that the vendor's attention takes.

In the plan's own dtype it is what the vendor reads: K and V `[blocks, 64, heads, D]`, latents `[blocks, 64, 576]`. The
storage keeps one slot more behind the blocks, unseen by the vendor.

Source: vllm-project/vllm-xpu-kernels at 4543b580, csrc/cache.cpp and csrc/xpu/attn/paged_kv_utils.h.
"""

from __future__ import annotations

from inferplane.plugin import KVLayout, paged_layout

BLOCK_TOKENS = 64
"""The size of blocks for which the most attention kernels were compiled; 16 and 32 have fewer."""

PAGED = "paged_64"


def layouts() -> tuple[KVLayout, ...]:
    """Every layout on offer, the plan's own dtype first."""
    return tuple(paged_layout(BLOCK_TOKENS, kv_dtype) for kv_dtype in ("auto", "int8"))
