"""KV layouts on Hygon DCUs, in blocks of 64 tokens.

| name | for | tensors, B blocks |
|---|---|---|
| dcu_heads_64 | K and V with heads in 64s up to 256 | K `[B + 1, G, 64, D]`, V `[B + 1, G, D, 64]` |
| paged_64 | K and V, latents | core's: K and V `[B, 64, G, D]`, latents `[B, 64, R + P]` |
| paged_64_int8 | K and V, latents | core's, with a scale a token and head |
| paged_64_fp8 | latents | core's, with a scale for 64 entries of a token; torch reads it |
| static_64_fp8 | latents of 512 + 64 | `[B, 64, 576]` in FP8 with one scale a layer, the checkpoint's or 1 |

K and V have no layout in FP8: the vendor's flash attention takes E4M3 on gfx938 alone (get_fp8_dtype_for_flashattn).

The first is what the vendor's paged attention for single tokens reads ("custom" in its vLLM plugin); the second what
its flash attention ("classic"), FlashMLA and the portable kernels read. Which is taken is decided with the kernels:
where one is as good as the other, the first on offer. The vendor's writes skip slot -1; in blocks of heads torch's own
write puts it into the spare block.

Source: HYGON-AI/vllm-plugin-das, vllm_hcu/csrc/ops.h (reshape_and_cache_hcu) and v1/attention/backends/flash_attn.py
(get_kv_cache_shape); the DCU fork's flash_attn_interface.py; 64 is the one size that all of them take.
"""

from __future__ import annotations

import torch

from inferplane.plugin import BlockedKV, KVLayout, KVRequest, paged_layout, static_layout, static_name

BLOCK_TOKENS = 64
PAGED, HEADS, LATENTS_FP8 = "paged_64", "dcu_heads_64", static_name(BLOCK_TOKENS, "fp8")
LARGEST_HEAD = 256
"""Entries of a head, which come in 64s: asserted by the fork's vllm_flash_attn_with_kvcache."""

LATENT_ENTRIES = 576
"""Of a latent and its rotated key, which FlashMLA alone knows."""


class HeadsKV(BlockedKV):
    """Blocks of heads: K `[blocks + 1, G, 64, D]`, V turned, `[blocks + 1, G, D, 64]`; the last block is spare.

    Args:
        request: what the layer remembers.
        blocks: number of blocks.
        dtype: of the entries.
        device: where the tensors live.
    """

    block_tokens, layout = BLOCK_TOKENS, HEADS

    def __init__(self, request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.request, self.blocks = request, blocks
        heads = request.heads
        self.keys = torch.zeros((blocks + 1, heads, BLOCK_TOKENS, request.dim), dtype=dtype, device=device)
        self.values = torch.zeros((blocks + 1, heads, request.v_dim, BLOCK_TOKENS), dtype=dtype, device=device)

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`; slot -1 is the last place of the last block, the spare one."""
        k, v = values
        block = torch.div(slots, BLOCK_TOKENS, rounding_mode="floor")
        place = slots - block * BLOCK_TOKENS
        self.keys[block, :, place] = k.to(self.keys.dtype)
        self.values[block, :, :, place] = v.to(self.values.dtype)

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        blocks = table[: -(-tokens // BLOCK_TOKENS)].long()
        k = self.keys[blocks].transpose(1, 2).flatten(0, 1)
        v = self.values[blocks].permute(0, 3, 1, 2).flatten(0, 1)
        return k[:tokens], v[:tokens]

    def list_tensors(self) -> tuple[torch.Tensor, ...]:
        """See `BlockedKV.list_tensors`; the spare block is behind the others."""
        return self.keys, self.values


def supports_heads(request: KVRequest) -> bool:
    """Whether the vendor's paged attention knows heads of this size."""
    return request.kind == "gqa" and request.dim == request.v_dim <= LARGEST_HEAD and request.dim % 64 == 0


def layouts(request: KVRequest) -> tuple[KVLayout, ...]:
    """Every layout on offer for a kind of layer, the vendor's first. Of two in FP8 core's comes first, for it is more
    precise: the vendor's is chosen where its kernels read it.
    """
    latent = request.kind == "mla"
    paged = tuple(paged_layout(BLOCK_TOKENS, kv_dtype) for kv_dtype in ("auto", "int8", *(("fp8",) if latent else ())))
    if latent and request.dim == LATENT_ENTRIES:
        return (*paged, static_layout(BLOCK_TOKENS, "fp8"))
    own = KVLayout(HEADS, BLOCK_TOKENS, HeadsKV, lambda r, dtype: BLOCK_TOKENS * r.entries * dtype.itemsize)
    return (own, *paged) if supports_heads(request) else paged
