"""A KV layout with static scales: one a layer for K and one for V, as many vendors' operators read them.

Core's other 8-bit layouts have a scale a token and head, which is computed when the token is written. Here the scales
come from the checkpoint, for which they were calibrated (`LayerKV.with_scales`). FP8 without any has a scale of 1, as
in vLLM and SGLang: E4M3 reaches from 2^-9 to 448 by itself, and a scale from the first tokens would let results depend
on which came first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from typing_extensions import Self

from inferplane.errors import UsageError
from inferplane.kvcache.blocked import BlockedKV, Zeros, make_zeros
from inferplane.types import KVLayout, KVRequest, LayerKV
from inferplane.types.qtensor import round_entries


class StaticDtype(NamedTuple):
    """How entries with static scales are stored.

    Args:
        dtype: of the entries.
        limit: largest magnitude of a scaled entry.
        unset: the scale of a cache that was given none. That of int8 suits entries of a normal distribution, with which
            layouts and kernels are checked; models never run with it, but for random weights.
        error: of an entry of such a distribution, relative to the largest one of its row.
    """

    dtype: torch.dtype
    limit: float
    unset: float
    error: float


STATIC_DTYPES = {
    # Half a step of E4M3's three bits behind the point, relative to the entry; those below 2^-6 have larger errors.
    "fp8": StaticDtype(torch.float8_e4m3fn, 448.0, 1.0, 1 / 16),
    "int8": StaticDtype(torch.int8, 127.0, 1 / 8, 1 / 16),
}
"""KV dtypes with static scales, by name."""
STATIC_SUFFIX = "_static"
"""`kv_cache_dtype` "int8_static" is int8 with static scales, also where the device has dynamic ones."""


class StaticKV(BlockedKV):
    """One layer's entries in 8 bits with static scales: K and V `[blocks, tokens, heads, D]`, or latents
    `[blocks, tokens, D]`. An entry is rounded after the division by its scale, and saturates. Slot -1 writes to a slot
    behind the blocks, which nothing reads.

    Attributes: `scale_values`, one for each of `KVRequest.entry_shapes`.

    Args:
        request: what the layer stores per token.
        blocks: number of blocks.
        block_tokens: tokens per block.
        layout: name of the layout.
        dtype: the plan's dtype, which `read` returns.
        device: of the tensors.
        kv_dtype: a key of `STATIC_DTYPES`.
        zeros: allocates the entries.
    """

    def __init__(
        self,
        request: KVRequest,
        blocks: int,
        block_tokens: int,
        layout: str,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: str = "fp8",
        zeros: Zeros = make_zeros,
    ) -> None:
        self.request, self.blocks, self.block_tokens, self.layout = request, blocks, block_tokens, layout
        self.dtype, self.spec = dtype, STATIC_DTYPES[kv_dtype]
        self.entries = [zeros(shape, self.spec.dtype, device) for shape in self.list_shapes()]
        self.scale_values: tuple[float, ...] = (self.spec.unset,) * len(request.entry_shapes)

    def list_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors of entries, by slot, with the slot behind the blocks."""
        return [(self.blocks * self.block_tokens + 1, *shape) for shape in self.request.entry_shapes]

    @property
    def scales(self) -> tuple[torch.Tensor, ...]:
        """The scales as float32 `[1]` on the device, for each of `KVRequest.entry_shapes`; made at the first call."""
        return self.once("inferplane.static_scales", _make_scales, self.scale_values, self.entries[0].device)

    def with_scales(self, scales: Sequence[float]) -> Self:
        """See `LayerKV.with_scales`."""
        if len(scales) != len(self.request.entry_shapes):
            raise UsageError(f"{len(scales)} scales for {len(self.request.entry_shapes)} tensors of entries.")
        return self.copy_with(shares=self.shares or self, scale_values=tuple(scales))

    def view_blocks(self) -> tuple[torch.Tensor, ...]:
        """Views `[blocks, block_tokens, ...]` of the entries, without the slot behind them."""
        return tuple(t[:-1].unflatten(0, (self.blocks, self.block_tokens)) for t in self.entries)

    def list_tensors(self) -> tuple[torch.Tensor, ...]:
        """See `BlockedKV.list_tensors`; scales belong to the layer, not to its blocks."""
        return self.view_blocks()

    def quantize(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows of entries in the stored dtype, by the scales."""
        limit, dtype = self.spec.limit, self.spec.dtype
        return tuple(round_entries(v.float() / s, dtype, limit) for v, s in zip(values, self.scale_values, strict=True))

    def dequantize(self, *entries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows of stored entries in the plan's dtype."""
        return tuple((e.float() * s).to(self.dtype) for e, s in zip(entries, self.scale_values, strict=True))

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        for entry, value in zip(self.entries, self.quantize(*values), strict=True):
            entry[slots] = value

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        blocks = table[: -(-tokens // self.block_tokens)].long()
        return self.dequantize(*(t[blocks].flatten(0, 1)[:tokens] for t in self.view_blocks()))


def _make_scales(values: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((1,), value, dtype=torch.float32, device=device) for value in values)


def static_name(block_tokens: int, kv_dtype: str) -> str:
    """The layout's name: "static_64_fp8"."""
    return f"static_{block_tokens}_{kv_dtype}"


def static_layout(block_tokens: int, kv_dtype: str, *, zeros: Zeros = make_zeros) -> KVLayout:
    """Describe the layout of `StaticKV`, "static_<tokens>_<kv dtype>".

    Args:
        block_tokens: tokens per block.
        kv_dtype: "fp8" or "int8".
        zeros: allocates the entries, `(shape, dtype, device)`.

    Raises:
        UsageError: the KV dtype has no static scales.
    """
    if kv_dtype not in STATIC_DTYPES:
        raise UsageError(f"KV dtype {kv_dtype!r} with static scales.", there_is=", ".join(sorted(STATIC_DTYPES)))
    name = static_name(block_tokens, kv_dtype)

    def build(request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        return StaticKV(request, blocks, block_tokens, name, dtype, device, kv_dtype, zeros)

    def bytes_per_block(request: KVRequest, dtype: torch.dtype) -> int:
        return block_tokens * request.entries * STATIC_DTYPES[kv_dtype].dtype.itemsize

    error = STATIC_DTYPES[kv_dtype].error
    return KVLayout(name, block_tokens, build, bytes_per_block, kv_dtype, error, has_static_scales=True)
