"""KV layouts that core cannot guess: 48-token blocks, heads before tokens, latents with tokens fastest, full of NaN."""

from __future__ import annotations

import torch

from inferplane.plugin import KVLayout, KVRequest, LayerKV, UsageError
from tests.mock_device.hidden import lifted, lowered

BLOCK_TOKENS = 48
HEADS_FIRST, LATENT = "mock_bhtd_48", "mock_bdt_48"


class HiddenKV(LayerKV):
    """Device memory, full of NaN; one block more than promised takes what is written to slot -1.

    "gqa": K and V `[blocks + 1, heads, 48, dim padded to 32]`; "mla": `[blocks + 1, dim, 48]`.
    """

    block_tokens = BLOCK_TOKENS

    def __init__(self, request: KVRequest, blocks: int, dtype: torch.dtype) -> None:
        self.request, self.blocks = request, blocks
        self.latent = request.kind == "mla"
        self.layout = LATENT if self.latent else HEADS_FIRST
        self.dims = [request.dim] if self.latent else [request.dim, request.v_dim]
        shapes = [(d, 48) if self.latent else (request.heads, 48, -(-d // 32) * 32) for d in self.dims]
        self.parts = [torch.full((blocks + 1, *s), torch.nan, dtype=dtype) for s in shapes]

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        self.write_raw(lowered(slots), *map(lowered, values))

    def write_raw(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        block, offset = slots // 48, slots % 48  # slot -1 is the last offset of the spare block
        for part, dim, value in zip(self.parts, self.dims, values, strict=True):
            if self.latent:
                part[block, :, offset] = value.to(part.dtype)
            else:
                part[block, :, offset, :dim] = value.to(part.dtype)

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        return lifted(self.read_raw(lowered(table), tokens))

    def read_raw(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        table = table[: -(-tokens // 48)].long()
        if self.latent:
            return (self.parts[0][table].transpose(1, 2).flatten(0, 1)[:tokens],)
        moved = (part[table].permute(0, 2, 1, 3).flatten(0, 1)[:tokens] for part in self.parts)
        return tuple(t[..., :dim] for t, dim in zip(moved, self.dims, strict=True))

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for part in self.parts:
            part[lowered(target).long()] = part[lowered(source).long()]

    def export(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part[lowered(blocks).long()] for part in self.parts)

    def load(self, blocks: torch.Tensor, stored: tuple[torch.Tensor, ...]) -> None:
        want = [(len(blocks), *part.shape[1:]) for part in self.parts]
        if [tuple(s.shape) for s in stored] != want:
            raise UsageError(f"{self.layout} loads tensors of shapes {want}.", there_is=str([s.shape for s in stored]))
        for part, s in zip(self.parts, stored, strict=True):
            part[lowered(blocks).long()] = s


def _build(request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
    assert device.type == "privateuseone", f"core builds the cache on {device}"
    return HiddenKV(request, blocks, dtype)


def _bytes_per_block(request: KVRequest, dtype: torch.dtype) -> int:
    return HiddenKV(request, 0, dtype).parts[0].nbytes + sum(p.nbytes for p in HiddenKV(request, 0, dtype).parts[1:])


def layout(request: KVRequest) -> KVLayout:
    """The mock's own layout for a kind of layer."""
    return KVLayout(LATENT if request.kind == "mla" else HEADS_FIRST, BLOCK_TOKENS, _build, _bytes_per_block)
