"""Caches of sparse attention on Ascend NPUs, in blocks of 128 tokens: index keys, and latents in int8.

| name | for | tensors, B blocks and a spare one |
|---|---|---|
| npu_index_nd_128 | index keys of 128 | keys `[B + 1, 128, 1, 128]` |
| npu_index_nd_128_int8 | the same in int8 | keys `[B + 1, 128, 1, 128]`, scales float16 `[B + 1, 128, 1]` |
| npu_latent_tiles_128_int8 | latents of 512 + 64 | rows int8 `[B + 1, 128, 1, 656]` |

A row of 656 bytes is a latent of 512 entries in int8, the rotated key in the plan's dtype of 16 bits, and the float32
scales of the latent's four tiles of 128 entries. An entry is its scale times an integer.

Source: pages of npu_lightning_indexer, npu_quant_lightning_indexer (whose scales are in float16 beside int8) and
npu_kv_quant_sparse_flash_attention in Ascend/op-plugin at 517f2e7d.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.plugin import KVRequest
from inferplane_npu.kvcache import BLOCK_TOKENS, INT8_LARGEST, LATENT, ROTARY, SpareBlockKV, even_first, interleave

INDEX_DIM = 128
"""Entries of an index key: the only width that the vendor's indexers know."""
TILE = 128
"""Entries of a latent that share a scale."""
TILES = LATENT // TILE
INDEX_ND_128, INDEX_INT8_128, LATENT_TILES_128 = (
    "npu_index_nd_128",
    "npu_index_nd_128_int8",
    "npu_latent_tiles_128_int8",
)


def count_row_bytes(dtype: torch.dtype) -> int:
    """Bytes of a row of `npu_latent_tiles_128_int8`: 656 where the rotated key has 16 bits an entry."""
    return LATENT + ROTARY * dtype.itemsize + TILES * torch.float32.itemsize


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers `[..., D]` in int8, and scales float32 `[...]`, which are the largest magnitude over 127."""
    scale = x.float().abs().amax(-1) / INT8_LARGEST
    scaled = x.float() / torch.where(scale == 0, 1.0, scale)[..., None]
    return scaled.clamp(-INT8_LARGEST, INT8_LARGEST).round().nan_to_num(0.0).to(torch.int8), scale


class NpuIndexKV(SpareBlockKV):
    """One layer's index keys, in the plan's dtype.

    Args:
        request: what the layer remembers.
        blocks: number of blocks; one spare block follows them.
        layout: the layout's name.
        dtype: of the entries.
        device: where the tensor lives.
    """

    def __init__(self, request: KVRequest, blocks: int, layout: str, dtype: torch.dtype, device: torch.device) -> None:
        self.request, self.blocks, self.layout = request, blocks, layout
        self.keys = torch.zeros((blocks + 1, BLOCK_TOKENS, 1, request.dim), dtype=dtype, device=device)

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`; slot -1 is the last one of the spare block."""
        self.keys.flatten(0, 1)[slots] = values[0].to(self.keys.dtype)

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        return (self.keys[table[: -(-tokens // BLOCK_TOKENS)].long()].flatten(0, 1)[:tokens],)

    def list_tensors(self) -> Sequence[torch.Tensor]:
        """See `BlockedKV.list_tensors`; the spare block is behind the others."""
        return (self.keys,)


class NpuInt8IndexKV(NpuIndexKV):
    """One layer's index keys in int8, each with a scale in float16.

    Args:
        request: what the layer remembers.
        blocks: number of blocks; one spare block follows them.
        layout: the layout's name.
        dtype: the plan's dtype, which `read` returns.
        device: where the tensors live.
    """

    def __init__(self, request: KVRequest, blocks: int, layout: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(request, blocks, layout, torch.int8, device)
        self.dtype = dtype
        self.scales = torch.zeros((blocks + 1, BLOCK_TOKENS, 1), dtype=torch.float16, device=device)

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        entries, scales = _quantize(values[0])
        self.keys.flatten(0, 1)[slots] = entries
        self.scales.flatten(0, 1)[slots] = scales.half()

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        blocks = table[: -(-tokens // BLOCK_TOKENS)].long()
        entries, scales = (t[blocks].flatten(0, 1)[:tokens].float() for t in (self.keys, self.scales))
        return ((entries * scales[..., None]).to(self.dtype),)

    def list_tensors(self) -> Sequence[torch.Tensor]:
        """See `BlockedKV.list_tensors`: keys, then scales."""
        return self.keys, self.scales


class NpuTiledLatentKV(SpareBlockKV):
    """One layer's latents in int8, with a scale for each tile of 128 entries; their rotated keys are not quantized, and
    have even entries first, as in the other layouts of latents.

    Args:
        request: what the layer remembers.
        blocks: number of blocks; one spare block follows them.
        layout: the layout's name.
        dtype: the plan's dtype, that of the rotated keys, which `read` returns.
        device: where the tensor lives.
    """

    def __init__(self, request: KVRequest, blocks: int, layout: str, dtype: torch.dtype, device: torch.device) -> None:
        self.request, self.blocks, self.layout, self.dtype = request, blocks, layout, dtype
        shape = (blocks + 1, BLOCK_TOKENS, 1, count_row_bytes(dtype))
        self.rows = torch.zeros(shape, dtype=torch.int8, device=device)

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        latent, rotated = values[0].split((LATENT, ROTARY), -1)
        entries, scales = _quantize(latent.unflatten(-1, (TILES, TILE)))
        parts = entries.flatten(1), even_first(rotated).to(self.dtype).contiguous(), scales.contiguous()
        self.rows.flatten(0, 2)[slots] = torch.cat([part.view(torch.int8) for part in parts], -1)

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        rows = self.rows[table[: -(-tokens // BLOCK_TOKENS)].long()].flatten(0, 2)[:tokens]
        entries, rotated, scales = rows.split((LATENT, ROTARY * self.dtype.itemsize, TILES * 4), -1)
        tiles = entries.unflatten(-1, (TILES, TILE)).float() * scales.contiguous().view(torch.float32)[..., None]
        both = tiles.flatten(1).to(self.dtype), interleave(rotated.contiguous().view(self.dtype))
        return (torch.cat(both, -1),)

    def list_tensors(self) -> Sequence[torch.Tensor]:
        """See `BlockedKV.list_tensors`; the spare block is behind the others."""
        return (self.rows,)
