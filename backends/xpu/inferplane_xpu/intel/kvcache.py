"""KV layouts on Intel GPUs: core's paged storage, in blocks of the size that the vendor's attention takes, and FP8.

In the plan's own dtype core's storage is what the vendor reads: K and V `[blocks, 64, heads, D]`, latents
`[blocks, 64, 576]`. The storage keeps one slot more behind the blocks, unseen by the vendor.

In FP8 the vendor reads entries of the same shapes with one scale a layer; core's storage has one a token and head. The
scale here is 1, as in vLLM for a checkpoint that brings none: E4M3 reaches from 2^-9 to 448 by itself, and a scale from
the first tokens would let results depend on which came first. Core's FP8 serves what the vendor's attention was not
compiled for.

Source: vllm-project/vllm-xpu-kernels at 4543b580, csrc/cache.cpp, csrc/xpu/attn/paged_kv_utils.h, and
csrc/xpu/attn/xe_2/paged_decode_xe2.cpp for the scales.
"""

from __future__ import annotations

import torch

from inferplane.plugin import BlockedKV, KVLayout, KVRequest, LayerKV, paged_layout

BLOCK_TOKENS = 64
"""The size of blocks for which the most attention kernels were compiled; 16 and 32 have fewer."""

PAGED, PAGED_FP8 = "paged_64", "xpu_64_fp8"

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
FP8_ERROR = 1 / 16
"""Half a step of E4M3's three bits behind the point, relative to the entry; entries below 2^-6 have larger errors."""

FP8_HEADS = (64, 96, 128, 192, 256)
FP8_LATENT = 576
"""Head sizes of K and V, and entries of a latent with its rotated part, that the vendor's attention reads in FP8."""


class Fp8KV(BlockedKV):
    """One layer's entries in FP8 (E4M3) with a scale of 1, clamped to 448: K and V `[blocks, 64, heads, D]`, or latents
    `[blocks, 64, 576]`. Slot -1 writes to a slot behind the blocks, which nothing reads.

    Args:
        request: what the layer stores per token.
        blocks: number of blocks.
        dtype: the plan's dtype, which `read` returns.
        device: of the tensors.
    """

    layout, block_tokens = PAGED_FP8, BLOCK_TOKENS

    def __init__(self, request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.request, self.blocks, self.dtype = request, blocks, dtype
        slots = blocks * BLOCK_TOKENS + 1
        self.entries = [torch.zeros((slots, *s), dtype=FP8, device=device) for s in request.entry_shapes]

    def view_blocks(self) -> tuple[torch.Tensor, ...]:
        """Views `[blocks, 64, ...]` of the entries, without the slot behind them."""
        return tuple(t[:-1].unflatten(0, (self.blocks, BLOCK_TOKENS)) for t in self.entries)

    def list_tensors(self) -> tuple[torch.Tensor, ...]:
        """See `BlockedKV.list_tensors`."""
        return self.view_blocks()

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        for entry, value in zip(self.entries, values, strict=True):
            entry[slots] = value.float().clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8)

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        blocks = table[: -(-tokens // BLOCK_TOKENS)].long()
        return tuple(t[blocks].flatten(0, 1)[:tokens].to(self.dtype) for t in self.view_blocks())


def is_read_in_fp8(request: KVRequest) -> bool:
    """Whether the vendor's attention may read a layer's entries in FP8."""
    if request.kind == "mla":
        return request.dim == FP8_LATENT
    return request.kind == "gqa" and request.dim == request.v_dim and request.dim in FP8_HEADS


def _fp8_layout() -> KVLayout:
    def build(request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        return Fp8KV(request, blocks, dtype, device)

    return KVLayout(
        PAGED_FP8, BLOCK_TOKENS, build, lambda request, dtype: BLOCK_TOKENS * request.entries, "fp8", FP8_ERROR
    )


def layouts(request: KVRequest) -> tuple[KVLayout, ...]:
    """Every layout on offer for one kind of layer, the plan's own dtype first. Of two in FP8 core's comes first, for it
    is more precise: the vendor's is chosen where its kernels read it.
    """
    core = tuple(paged_layout(BLOCK_TOKENS, kv_dtype) for kv_dtype in ("auto", "int8", "fp8"))
    return (*core, _fp8_layout()) if is_read_in_fp8(request) else core
