"""KV layouts on Intel GPUs: core's paged storage, in blocks of the size that the vendor's attention takes, and FP8.

In the plan's own dtype core's storage is what the vendor reads: K and V `[blocks, 64, heads, D]`, latents
`[blocks, 64, 576]`. The storage keeps one slot more behind the blocks, unseen by the vendor.

In FP8 the vendor reads entries of the same shapes with one scale a layer for K and one for V: the checkpoint's, or 1.
Core's FP8 serves what the vendor's attention was not compiled for.

Source: vllm-project/vllm-xpu-kernels at 4543b580, csrc/cache.cpp, csrc/xpu/attn/paged_kv_utils.h, and
csrc/xpu/attn/xe_2/paged_decode_xe2.cpp for the scales.
"""

from __future__ import annotations

from inferplane.plugin import KVLayout, KVRequest, paged_layout, static_layout, static_name

BLOCK_TOKENS = 64
"""The size of blocks for which the most attention kernels were compiled; 16 and 32 have fewer."""

PAGED, PAGED_FP8 = "paged_64", static_name(BLOCK_TOKENS, "fp8")

FP8_HEADS = (64, 96, 128, 192, 256)
FP8_LATENT = 576
"""Head sizes of K and V, and entries of a latent with its rotated part, that the vendor's attention reads in FP8."""


def is_read_in_fp8(request: KVRequest) -> bool:
    """Whether the vendor's attention may read a layer's entries in FP8."""
    if request.kind == "mla":
        return request.dim == FP8_LATENT
    return request.kind == "gqa" and request.dim == request.v_dim and request.dim in FP8_HEADS


def layouts(request: KVRequest) -> tuple[KVLayout, ...]:
    """Every layout on offer for one kind of layer, the plan's own dtype first. Of two in FP8 core's comes first, for it
    is more precise: the vendor's is chosen where its kernels read it.
    """
    core = tuple(paged_layout(BLOCK_TOKENS, kv_dtype) for kv_dtype in ("auto", "int8", "fp8"))
    return (*core, static_layout(BLOCK_TOKENS, "fp8")) if is_read_in_fp8(request) else core
