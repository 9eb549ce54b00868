"""KV layouts on Enflame GCUs: blocks of 64 tokens.

| name | for | tensors, B blocks |
|---|---|---|
| paged_64 | K and V, latents | core's: K and V `[B, 64, G, D]`, latents `[B, 64, 576]` |
| paged_64_int8 | K and V, latents | core's, with a scale a token and head; torch reads it |
| gcu_static_64_int8 | K and V, `PAGED_HEADS` | K `[B, G, D / 16, 64, 16]`, V `[B, G, D, 64]`; static scales |

In the plan's own dtype core's paged storage is what the vendor reads, for flash attention and FlashMLA. It has one slot
more behind the blocks, unseen by them. In int8 the vendor's paged attention reads K in pieces of 16 bytes
and V turned, with one scale and zero point a layer as numbers of the host; zero points are 0 here. It is on offer
where the checkpoint has static scales, with one spare block for slot -1.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9, vllm_gcu/gcu.py (on the S60 it stores int8 where FP8 is requested),
attention/backends/flash_attn.py and mla_v1.py, and for int8 attention/ops/paged_attn.py (split_kv_cache).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from inferplane.plugin import KVLayout, KVRequest, LayerKV, StaticKV, paged_layout, static_layout

BLOCK_TOKENS = 64
"""What vllm-gcu chooses by default (vllm_gcu/gcu.py, check_and_update_config)."""

PAGED, STATIC_INT8 = "paged_64", "gcu_static_64_int8"
PAGED_HEADS = (32, 64, 80, 96, 112, 128, 192, 256)
"""Entries of a head, of those that paged attention takes, that are whole pieces of 16 bytes in int8."""
PIECE = 16


class PiecesKV(StaticKV):
    """K in pieces of 16 entries, `[blocks + 1, G, D / 16, 64, 16]`, and V turned, `[blocks + 1, G, D, 64]`; the last
    block is spare. See `StaticKV` for the arguments and scales."""

    def list_shapes(self) -> list[tuple[int, ...]]:
        """See `StaticKV.list_shapes`."""
        r, blocks = self.request, self.blocks + 1
        return [(blocks, r.heads, r.dim // PIECE, BLOCK_TOKENS, PIECE), (blocks, r.heads, r.v_dim, BLOCK_TOKENS)]

    def view_blocks(self) -> tuple[torch.Tensor, ...]:
        """The entries without the spare block."""
        return tuple(t[:-1] for t in self.entries)

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`; slot -1 is the last place of the last block, the spare one."""
        k, v = self.quantize(*values)
        block = torch.div(slots, BLOCK_TOKENS, rounding_mode="floor")
        place = slots - block * BLOCK_TOKENS
        self.entries[0][block, :, :, place] = k.unflatten(-1, (-1, PIECE))
        self.entries[1][block, :, :, place] = v

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        blocks = table[: -(-tokens // BLOCK_TOKENS)].long()
        k = self.entries[0][blocks].permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
        v = self.entries[1][blocks].permute(0, 3, 1, 2).flatten(0, 1)
        return self.dequantize(k[:tokens], v[:tokens])


def _build(request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
    return PiecesKV(request, blocks, BLOCK_TOKENS, STATIC_INT8, dtype, device, "int8")


def layouts(request: KVRequest) -> tuple[KVLayout, ...]:
    """Every layout on offer for a kind of layer, the plan's own dtype first. Of two in int8 core's comes first, for it
    is more precise: the vendor's is chosen where its kernels read it.
    """
    core = tuple(paged_layout(BLOCK_TOKENS, kv_dtype) for kv_dtype in ("auto", "int8"))
    if request.kind != "gqa" or request.dim != request.v_dim or request.dim not in PAGED_HEADS:
        return core
    return (*core, replace(static_layout(BLOCK_TOKENS, "int8"), name=STATIC_INT8, build=_build))
