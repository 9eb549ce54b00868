"""Core's own KV storage: blocks of tokens in plain torch tensors, as they are or quantized. Works on every device.

Backends use it with a block size of their choosing until they have a layout of their own. Quantized storages keep one
scale a token and head (or a token and 64 entries for latents, whose parts differ in size), chosen when the token is
written, so that what attention reads never depends on how a prompt was cut into chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch

from inferplane.errors import UsageError
from inferplane.kvcache.blocked import BlockedKV
from inferplane.types import HOST, KVLayout, KVRequest, LayerKV


class KVDtype(NamedTuple):
    """A way to store entries: torch dtype, the largest magnitude a scaled entry may have (0: stored unscaled), and the
    largest rounding error relative to the largest entry of a group (half a step of the format).
    """

    dtype: torch.dtype | None
    limit: float
    error: float


KV_DTYPES: dict[str, KVDtype] = {
    "auto": KVDtype(None, 0.0, 0.0),
    "fp8": KVDtype(torch.float8_e4m3fn, 448.0, 16 / 448),
    "int8": KVDtype(torch.int8, 127.0, 0.5 / 127),
}
"""KV dtypes by name; "auto" keeps the plan's dtype."""

LATENT_GROUP = 64
"""Entries of a latent that share a scale: both V3's 512 latent entries and its 64 rotated ones are multiples of it."""


@dataclass(frozen=True)
class _Part:
    """One tensor of entries a token, e.g. K: `heads` groups of `dim` entries, each with its own scale if quantized."""

    heads: int
    dim: int


Zeros = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]
"""Makes a tensor of zeros: shape, dtype, device."""


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the host in memory that the system zeroes when it is touched, so an unused cache costs nothing."""
    if device.type != HOST:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _parts(request: KVRequest) -> tuple[_Part, ...]:
    if request.kind == "mla":
        group = LATENT_GROUP if request.dim % LATENT_GROUP == 0 else request.dim
        return (_Part(request.dim // group, group),)
    return _Part(request.heads, request.dim), _Part(request.heads, request.v_dim)


class PagedKV(BlockedKV):
    """Entries `[slots, heads, dim]`, block after block, with scales `[slots, heads]` beside them when quantized.

    One slot more than the blocks hold is kept at the end: slot -1, which marks padding, falls there and is never read.

    Args:
        request: what the layer remembers.
        blocks: number of blocks.
        block_tokens: tokens a block.
        layout: the layout's name.
        dtype: the plan's dtype, in which `read` answers.
        device: where the tensors live.
        kv_dtype: a name of `KV_DTYPES`.
        power_of_two: scales are rounded up to powers of two, so that multiplying by one is exact in any float format.
        zeros: makes the tensors.
    """

    def __init__(
        self,
        request: KVRequest,
        blocks: int,
        block_tokens: int,
        layout: str,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: str = "auto",
        power_of_two: bool = False,
        zeros: Zeros = _zeros,
    ) -> None:
        self.power_of_two = power_of_two
        self.request, self.blocks, self.block_tokens, self.layout = request, blocks, block_tokens, layout
        self.dtype, self.spec = dtype, KV_DTYPES[kv_dtype]
        slots = blocks * block_tokens + 1
        kept = self.spec.dtype or dtype
        self.entries = [zeros((slots, p.heads, p.dim), kept, device) for p in _parts(request)]
        self.scales = (
            [zeros((slots, p.heads), torch.float32, device) for p in _parts(request)] if self.spec.limit else []
        )

    def blocked(self) -> tuple[torch.Tensor, ...]:
        """Views `[blocks, block_tokens, heads, dim]` of the entries, for kernels that know this layout."""
        return tuple(t[:-1].unflatten(0, (self.blocks, self.block_tokens)) for t in self.entries)

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        for i, (entry, value) in enumerate(zip(self.entries, values)):
            v = value.reshape(value.shape[0], *entry.shape[1:])
            if not self.scales:
                entry[slots] = v.to(entry.dtype)
                continue
            amax = v.float().abs().amax(-1)
            scale = amax / self.spec.limit
            if self.power_of_two:
                scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
            scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # zeros, and amax too small to divide
            scaled = v.float() / scale[..., None]
            entry[slots] = (scaled.round() if entry.dtype == torch.int8 else scaled).to(entry.dtype)
            self.scales[i][slots] = scale

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        count = -(-tokens // self.block_tokens)
        blocks = table[:count].long()
        out = []
        for i, entry in enumerate(self.entries):
            v = entry[:-1].unflatten(0, (self.blocks, self.block_tokens))[blocks].flatten(0, 1)[:tokens]
            if self.scales:
                scale = self.scales[i][:-1].unflatten(0, (self.blocks, self.block_tokens))[blocks]
                v = (v.float() * scale.flatten(0, 1)[:tokens, :, None]).to(self.dtype)
            out.append(v)
        if self.request.kind == "mla":
            return (out[0].flatten(1),)
        return tuple(out)

    def stored(self) -> tuple[torch.Tensor, ...]:
        """See `BlockedKV.stored`; entries first, then scales, each `[blocks, block_tokens, ...]`."""
        n = (self.blocks, self.block_tokens)
        return tuple(t[:-1].unflatten(0, n) for t in (*self.entries, *self.scales))


def latents(kv: LayerKV) -> torch.Tensor:
    """A view `[blocks, block_tokens, latent + rotated]` of a cache of latents in core's storage, not quantized."""
    return cast(PagedKV, kv).blocked()[0].flatten(2)


def paged_layout(
    block_tokens: int, kv_dtype: str = "auto", *, power_of_two: bool = False, zeros: Zeros = _zeros
) -> KVLayout:
    """Core's storage with `block_tokens` tokens a block, named "paged_<tokens>" or "paged_<tokens>_<kv dtype>", and
    then "_p2" with scales that are powers of two.

    Args:
        block_tokens: tokens a block, at least 1.
        kv_dtype: "auto" (the plan's dtype), "fp8" or "int8".
        power_of_two: round scales up to powers of two: cheap to apply and exact, at up to twice the rounding error.
        zeros: makes the tensors, `(shape, dtype, device)`, where a device has memory that suits a cache better.

    Raises:
        UsageError: unknown KV dtype, or a block of no tokens.
    """
    if kv_dtype not in KV_DTYPES:
        raise UsageError(f"Unknown KV dtype {kv_dtype!r}.", there_is=", ".join(sorted(KV_DTYPES)))
    if block_tokens < 1:
        raise UsageError(f"A KV block of {block_tokens} tokens.", remedy="use at least 1")
    name = f"paged_{block_tokens}" + ("" if kv_dtype == "auto" else f"_{kv_dtype}") + ("_p2" if power_of_two else "")

    def build(request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        return PagedKV(request, blocks, block_tokens, name, dtype, device, kv_dtype, power_of_two, zeros)

    def bytes_per_block(request: KVRequest, dtype: torch.dtype) -> int:
        spec = KV_DTYPES[kv_dtype]
        size = (spec.dtype or dtype).itemsize
        scales = sum(4 * p.heads for p in _parts(request)) if spec.limit else 0
        return block_tokens * (request.entries * size + scales)

    error = KV_DTYPES[kv_dtype].error * (2 if power_of_two else 1)
    return KVLayout(name, block_tokens, build, bytes_per_block, kv_dtype, error)
