"""KV layouts on NVIDIA GPUs: core's paged storage in blocks of 64 tokens."""

from __future__ import annotations

from inferplane.plugin import KVLayout, paged_layout

BLOCK_TOKENS = 64
"""FlashMLA takes no other block size, and FlashAttention-3 and FlashInfer take this one too."""


def layouts() -> tuple[KVLayout, ...]:
    """Every layout on offer, the plan's own dtype first. FP8 entries have scales that are powers of two: widening one
    to bfloat16 is then a shift, a mask and an exact product.
    """
    return (
        paged_layout(BLOCK_TOKENS),
        paged_layout(BLOCK_TOKENS, "fp8", power_of_two=True),
        paged_layout(BLOCK_TOKENS, "int8"),
    )


NAMES = tuple(layout.name for layout in layouts())
"""Names of the layouts, as kernels state them."""
