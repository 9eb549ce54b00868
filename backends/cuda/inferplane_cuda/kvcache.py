"""KV layouts on NVIDIA GPUs: core's paged storage in blocks of 64 tokens, and latents for FP8 products."""

from __future__ import annotations

import torch

from inferplane.plugin import BlockedKV, KVLayout, KVRequest, paged_layout

BLOCK_TOKENS = 64
"""FlashMLA takes no other block size, and FlashAttention-3 and FlashInfer take this one too."""


def list_paged_layouts() -> tuple[KVLayout, ...]:
    """Core's paged layouts, the plan's own dtype first. FP8 entries have scales that are powers of two: widening one
    to bfloat16 is then a shift, a mask and an exact product.
    """
    return (
        paged_layout(BLOCK_TOKENS),
        paged_layout(BLOCK_TOKENS, "fp8", power_of_two=True),
        paged_layout(BLOCK_TOKENS, "int8"),
    )


LATENT, ROTATED = 512, 64
TOKEN_SCALED = "latent_64_fp8"
"""Latents in FP8 with one scale per token, the rotated part in bfloat16: FP8 products read them directly."""


class TokenScaledLatents(BlockedKV):
    """Latents `[slots, 512]` float8_e4m3fn, a scale per slot (a power of two), rotated entries `[slots, 64]` bfloat16.

    As in core's storage, one slot more than the blocks hold takes what slot -1 writes.
    """

    layout, block_tokens = TOKEN_SCALED, BLOCK_TOKENS

    def __init__(self, request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.request, self.blocks, self.dtype = request, blocks, dtype
        slots = blocks * BLOCK_TOKENS + 1
        self.latents = torch.zeros(slots, LATENT, device=device).to(torch.float8_e4m3fn)
        self.scales = torch.ones(slots, device=device)
        self.ropes = torch.zeros(slots, ROTATED, device=device, dtype=torch.bfloat16)

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        latent, rope = values[0].split((LATENT, ROTATED), -1)
        scale = latent.float().abs().amax(-1) / 448.0
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        self.latents[slots] = (latent.float() / scale[:, None]).to(torch.float8_e4m3fn)
        self.scales[slots] = scale
        self.ropes[slots] = rope.to(torch.bfloat16)

    def list_tensors(self) -> tuple[torch.Tensor, ...]:
        """See `BlockedKV.list_tensors`: latents, scales, rotated entries."""
        stored = (self.latents, self.scales, self.ropes)
        return tuple(t[:-1].unflatten(0, (self.blocks, BLOCK_TOKENS)) for t in stored)

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        blocks = table[: -(-tokens // BLOCK_TOKENS)].long()
        latents, scales, ropes = (t[blocks].flatten(0, 1)[:tokens] for t in self.list_tensors())
        return (torch.cat(((latents.float() * scales[:, None]).to(self.dtype), ropes.to(self.dtype)), -1),)


def token_scaled_layout() -> KVLayout:
    """The layout of `TokenScaledLatents`."""
    size = BLOCK_TOKENS * (LATENT + 4 + 2 * ROTATED)
    return KVLayout(
        TOKEN_SCALED, BLOCK_TOKENS, TokenScaledLatents, lambda request, dtype: size, "fp8", tolerance=2 * 16 / 448
    )


def layouts_for(request: KVRequest) -> tuple[KVLayout, ...]:
    """Every layout that this backend has for a cache request."""
    own = request.kind == "mla" and request.dim == LATENT + ROTATED
    return (*list_paged_layouts(), token_scaled_layout()) if own else list_paged_layouts()


PAGED_NAMES = tuple(layout.name for layout in list_paged_layouts())
"""Names of the layouts, as kernels state them."""
