"""KV layouts on Kunlun cards: heads before tokens within a block, as the vendor's attention reads them.

| name | for | tensors, B blocks and a spare one |
|---|---|---|
| kunlun_bhld_16 | K and V | K `[B + 1, G, 16, D]`, V `[B + 1, G, 16, Dv]` |
| kunlun_latent_64 | latents | `[B + 1, 1, 64, latent + rotated]`, which is `[B + 1, 64, ...]` as well |

What the vendor's writes do with slot -1 is written nowhere, so padded rows go to the spare block, which no block table
names.

Source: baidu/vLLM-Kunlun at 09869ee7, vllm_kunlun/ops/paged_attn.py, ops/attention/flashmla.py and platforms/kunlun.py.
"""

from __future__ import annotations

import torch

from inferplane.plugin import BlockedKV, KVLayout, KVRequest, LayerKV, paged_layout

BLOCK_TOKENS = 16
LATENT_BLOCK_TOKENS = 64
"""Kunlun's FlashMLA takes no other block size; its other attention is run with 16 (vllm_kunlun/platforms/kunlun.py)."""

BHLD, LATENT = "kunlun_bhld_16", "kunlun_latent_64"


class KunlunKV(BlockedKV):
    """One layer's blocks: tensors `[blocks + 1, heads, block tokens, dim]`, two for K and V, one for latents.

    Args:
        request: what the layer remembers.
        blocks: number of blocks; one spare block follows them.
        layout: the layout's name.
        block_tokens: tokens a block.
        dtype: of the entries.
        device: where the tensors live.
    """

    def __init__(
        self,
        request: KVRequest,
        blocks: int,
        layout: str,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.request, self.blocks, self.layout, self.block_tokens = request, blocks, layout, block_tokens
        heads, dims = (1, (request.dim,)) if request.kind == "mla" else (request.heads, (request.dim, request.v_dim))
        shape = (blocks + 1, heads, block_tokens)
        self.parts = [torch.zeros((*shape, dim), dtype=dtype, device=device) for dim in dims]

    def real(self, slots: torch.Tensor) -> torch.Tensor:
        """`[T]` slots for the vendor's writes: padded rows go to slots of the spare block."""
        spare = self.blocks * self.block_tokens + torch.arange(slots.shape[0], device=slots.device) % self.block_tokens
        return torch.where(slots < 0, spare, slots)

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`; slot -1 is the last place of the spare block."""
        block = torch.div(slots, self.block_tokens, rounding_mode="floor")
        for part, value in zip(self.parts, values, strict=True):
            rows = value.reshape(value.shape[0], part.shape[1], part.shape[3])
            part[block, :, slots - block * self.block_tokens] = rows.to(part.dtype)

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        blocks = table[: -(-tokens // self.block_tokens)].long()
        out = tuple(part[blocks].transpose(1, 2).flatten(0, 1)[:tokens] for part in self.parts)
        return (out[0][:, 0],) if self.request.kind == "mla" else out

    def list_tensors(self) -> list[torch.Tensor]:
        """See `BlockedKV.list_tensors`; the spare block is behind the others."""
        return self.parts


def _layout(name: str, block_tokens: int) -> KVLayout:
    def build(request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        return KunlunKV(request, blocks, name, block_tokens, dtype, device)

    return KVLayout(name, block_tokens, build, lambda request, dtype: block_tokens * request.entries * dtype.itemsize)


def layouts(request: KVRequest) -> tuple[KVLayout, ...]:
    """Every layout on offer for one kind of layer: the vendor's and core's in int8, or core's alone, in blocks of
    either size, since all layers of a model share one.
    """
    if request.kind == "gqa":
        return _layout(BHLD, BLOCK_TOKENS), paged_layout(BLOCK_TOKENS, "int8")
    if request.kind == "mla":
        return _layout(LATENT, LATENT_BLOCK_TOKENS), paged_layout(LATENT_BLOCK_TOKENS, "int8")
    return tuple(paged_layout(size, kv) for kv in ("auto", "int8") for size in (BLOCK_TOKENS, LATENT_BLOCK_TOKENS))
