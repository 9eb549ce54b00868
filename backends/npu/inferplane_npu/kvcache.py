"""K, V and latents on Ascend NPUs, in blocks of 128 tokens, as the vendor's attention reads them.

| name | for | tensors, B blocks and a spare one |
|---|---|---|
| npu_nd_128 | K and V | K `[B + 1, 128, G, D]`, V `[B + 1, 128, G, Dv]` |
| npu_nz_128 | K and V, on the 310P | K `[B + 1, G D / 16, 128, 16]`, V likewise |
| npu_nd_128_int8 | K and V in int8 | K `[B + 1, 128, G, D]`, its scales `[B + 1, G, 128]`, V likewise |
| npu_latent_nd_128 | latents of 512 + 64 | latent `[B + 1, 128, 1, 512]`, rotated key `[B + 1, 128, 1, 64]` |
| npu_latent_nz_128 | latents of 512 + 64 | latent `[B + 1, 32, 128, 16]`, rotated key `[B + 1, 4, 128, 16]` |

The vendor has no mark for padding: its writes demand slots that exist and differ. So slot -1 becomes a slot of the
spare block, which no block table names.

The rotated key of a latent is stored with its even entries first and its odd ones behind, as the vendor's fused write
leaves it (npu_kv_rmsnorm_rope_cache); `read` gives it in canonical order.

An int8 entry is its token's and head's scale times an integer, as the mode "pertoken, perhead, page attention" of the
vendor's attention reads it.

Source: pages of npu_scatter_pa_kv_cache, npu_kv_rmsnorm_rope_cache, npu_fused_infer_attention_score and its v2
(op-plugin at 517f2e7d); vllm-ascend at 182b75ea, attention_v1.py, _310p/attention/attention_v1.py, and
_310p/model_runner_310p.py, which makes the 310P's caches in the NZ format.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.plugin import BlockedKV, KVRequest

npu = torch.ops.npu

BLOCK_TOKENS = 128
"""The paged form of the vendor's fused attention takes no other size in vllm-ascend (attention_v1.py)."""

LATENT, ROTARY = 512, 64
"""Entries of a latent and of its rotated key: the only sizes that the vendor's fused operators know."""

NZ = 16
"""Entries of the last dimension of an NZ tile of 16-bit numbers."""

FRACTAL_NZ = 29
"""ACL's number of the NZ format."""

ND_128, NZ_128, LATENT_ND_128, LATENT_NZ_128 = "npu_nd_128", "npu_nz_128", "npu_latent_nd_128", "npu_latent_nz_128"
ND_128_INT8 = "npu_nd_128_int8"

INT8_ALIGNMENT = 32
"""What the width of an int8 head is a multiple of, for the vendor's attention."""

INT8_LARGEST = 127.0

TOKEN_HEAD_PAGED = 5
"""Value of `key_antiquant_mode`: a scale a token and head, in blocks like the entries."""


def even_first(x: torch.Tensor) -> torch.Tensor:
    """`[..., D]` with entries 0, 2, 4, ... first and 1, 3, 5, ... behind."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def interleave(x: torch.Tensor) -> torch.Tensor:
    """The other way round: `[..., D]` in canonical order again."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class SpareBlockKV(BlockedKV):
    """A cache with one block more than block tables name, which takes padded rows. Attributes: `blocks`, without it."""

    block_tokens = BLOCK_TOKENS
    blocks: int

    def real(self, slots: torch.Tensor) -> torch.Tensor:
        """`[T]` slots for the vendor's writes: padded rows go to slots of the spare block, different ones for up to 128
        padded rows in a row.
        """
        spare = self.blocks * BLOCK_TOKENS + torch.arange(slots.shape[0], device=slots.device) % BLOCK_TOKENS
        return torch.where(slots < 0, spare, slots)


class NpuKV(SpareBlockKV):
    """One layer's blocks in one of the vendor's layouts: two tensors, `first` and `second`.

    Args:
        request: what the layer remembers.
        blocks: number of blocks; one spare block follows them.
        layout: the layout's name.
        dtype: of the entries.
        device: where the tensors live.
    """

    def __init__(self, request: KVRequest, blocks: int, layout: str, dtype: torch.dtype, device: torch.device) -> None:
        self.request, self.blocks, self.layout = request, blocks, layout
        self.latent, self.nz = request.kind == "mla", layout in (NZ_128, LATENT_NZ_128)
        heads = request.heads
        self.dims = (LATENT, ROTARY) if self.latent else (request.dim, request.v_dim)
        shapes = [(heads * d // NZ, BLOCK_TOKENS, NZ) if self.nz else (BLOCK_TOKENS, heads, d) for d in self.dims]
        self.first, self.second = (torch.zeros((blocks + 1, *s), dtype=dtype, device=device) for s in shapes)
        if layout == NZ_128:  # ATB asks for the format too, not for the shape alone
            self.first, self.second = (npu.npu_format_cast(t, FRACTAL_NZ) for t in (self.first, self.second))

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views `[blocks + 1, 128, heads * dim]` of both tensors, the form BnBsH of the vendor's attention; ND only."""
        return self.first.flatten(2), self.second.flatten(2)

    def antiquant(self) -> dict[str, Any]:
        """Arguments of the vendor's attention that say how entries are quantized: none."""
        return {}

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        if self.latent:
            latent, rotated = values[0].split((LATENT, ROTARY), -1)
            values = latent[:, None], even_first(rotated)[:, None]
        for part, value in zip((self.first, self.second), values, strict=True):
            if self.nz:  # slot -1 is the last offset of the last block, the spare one
                block = torch.div(slots, BLOCK_TOKENS, rounding_mode="floor")
                part[block, :, slots - block * BLOCK_TOKENS] = value.flatten(1).unflatten(1, (-1, NZ)).to(part.dtype)
            else:
                part.view(-1, *part.shape[2:])[slots] = value.to(part.dtype)

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        blocks = table[: -(-tokens // BLOCK_TOKENS)].long()
        out = []
        for part, dim in zip((self.first, self.second), self.dims, strict=True):
            held = part[blocks]
            held = held.transpose(1, 2).flatten(2) if self.nz else held
            out.append(held.flatten(0, 1)[:tokens].view(tokens, self.request.heads, dim))
        if not self.latent:
            return tuple(out)
        return (torch.cat((out[0], interleave(out[1])), -1)[:, 0],)

    def list_tensors(self) -> tuple[torch.Tensor, ...]:
        """See `BlockedKV.list_tensors`; the spare block is behind the others."""
        return self.first, self.second


class NpuInt8KV(NpuKV):
    """One layer's K and V in int8, in ND, each with a scale a token and head.

    The scale is the largest magnitude of the head's entries over 127, which is what npu_dynamic_quant makes; that of
    zeros is 0.

    Args:
        request: what the layer remembers; K and V of one width.
        blocks: number of blocks; one spare block follows them.
        layout: the layout's name.
        dtype: the plan's dtype, which `read` returns.
        device: where the tensors live.
    """

    def __init__(self, request: KVRequest, blocks: int, layout: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(request, blocks, layout, torch.int8, device)
        self.dtype = dtype
        shape = (blocks + 1, request.heads, BLOCK_TOKENS)
        self.scales = tuple(torch.zeros(shape, dtype=torch.float32, device=device) for _ in self.dims)

    def antiquant(self) -> dict[str, Any]:
        """Arguments of the vendor's attention: the scales, float32 `[B + 1, G, 128]`, and their mode."""
        key, value = self.scales
        return {
            "key_antiquant_scale": key,
            "value_antiquant_scale": value,
            "key_antiquant_mode": TOKEN_HEAD_PAGED,
            "value_antiquant_mode": TOKEN_HEAD_PAGED,
        }

    def write_scales(self, slots: torch.Tensor, *scales: torch.Tensor) -> None:
        """Store the scales of K and of V, each float32 `[T, G]`; slot -1 is the last one of the spare block."""
        block = torch.div(slots, BLOCK_TOKENS, rounding_mode="floor")
        for part, scale in zip(self.scales, scales, strict=True):
            part[block, :, slots - block * BLOCK_TOKENS] = scale

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        scales = [value.float().abs().amax(-1) / INT8_LARGEST for value in values]
        for part, value, scale in zip((self.first, self.second), values, scales, strict=True):
            scaled = value.float() / torch.where(scale == 0, 1.0, scale)[..., None]
            entries = scaled.clamp(-INT8_LARGEST, INT8_LARGEST).round().nan_to_num(0.0)
            part.view(-1, *part.shape[2:])[slots] = entries.to(torch.int8)
        self.write_scales(slots, *scales)

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        blocks = table[: -(-tokens // BLOCK_TOKENS)].long()
        out = []
        for part, scales in zip((self.first, self.second), self.scales, strict=True):
            scale = scales[blocks].transpose(1, 2).flatten(0, 1)[:tokens]
            out.append((part[blocks].flatten(0, 1)[:tokens].float() * scale[..., None]).to(self.dtype))
        return tuple(out)

    def list_tensors(self) -> tuple[torch.Tensor, ...]:
        """See `BlockedKV.list_tensors`: entries, then scales."""
        return self.first, self.second, *self.scales
