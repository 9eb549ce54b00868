"""A KV layout in FP8 with a scale of 1, which several vendors' operators write and read.

Their operators know one scale a layer, where core's own FP8 has one a token and head. It is 1 here, as in vLLM and
SGLang for a checkpoint that brings none: E4M3 reaches from 2^-9 to 448 by itself, and a scale from the first tokens
would let results depend on which came first.
"""

from __future__ import annotations

import torch

from inferplane.plugin import BlockedKV, KVLayout, KVRequest, LayerKV

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
ERROR = 1 / 16
"""Half a step of E4M3's three bits behind the point, relative to the entry; entries below 2^-6 have larger errors."""


class UnitScaledKV(BlockedKV):
    """One layer's entries in FP8 (E4M3) with a scale of 1, clamped to 448: K and V `[blocks, tokens, heads, D]`, or
    latents `[blocks, tokens, D]`. Slot -1 writes to a slot behind the blocks, which nothing reads.

    Args:
        request: what the layer stores per token.
        blocks: number of blocks.
        block_tokens: tokens per block.
        layout: name of the layout.
        dtype: the plan's dtype, which `read` returns.
        device: of the tensors.
    """

    def __init__(
        self,
        request: KVRequest,
        blocks: int,
        block_tokens: int,
        layout: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.request, self.blocks, self.block_tokens, self.layout = request, blocks, block_tokens, layout
        self.dtype = dtype
        slots = blocks * block_tokens + 1
        self.entries = [torch.zeros((slots, *s), dtype=FP8, device=device) for s in request.entry_shapes]

    def view_blocks(self) -> tuple[torch.Tensor, ...]:
        """Views `[blocks, block_tokens, ...]` of the entries, without the slot behind them."""
        return tuple(t[:-1].unflatten(0, (self.blocks, self.block_tokens)) for t in self.entries)

    def list_tensors(self) -> tuple[torch.Tensor, ...]:
        """See `BlockedKV.list_tensors`."""
        return self.view_blocks()

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        for entry, value in zip(self.entries, values, strict=True):
            entry[slots] = value.float().clamp(-LARGEST, LARGEST).to(FP8)

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        blocks = table[: -(-tokens // self.block_tokens)].long()
        return tuple(t[blocks].flatten(0, 1)[:tokens].to(self.dtype) for t in self.view_blocks())


def name_of(block_tokens: int) -> str:
    """The layout's name: "unit_64_fp8"."""
    return f"unit_{block_tokens}_fp8"


def unit_scaled_layout(block_tokens: int) -> KVLayout:
    """The layout of `UnitScaledKV` with `block_tokens` tokens per block."""
    name = name_of(block_tokens)

    def build(request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        return UnitScaledKV(request, blocks, block_tokens, name, dtype, device)

    return KVLayout(name, block_tokens, build, lambda request, dtype: block_tokens * request.entries, "fp8", ERROR)
