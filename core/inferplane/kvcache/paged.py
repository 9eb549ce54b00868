"""Core's own KV cache layout: blocks of tokens in plain torch tensors, quantized or not. It works on every device.

A backend uses it, with a block size of its choice, unless it has a layout of its own. Quantized caches have one scale
per token and head (for latents one per token and 64 entries, because their parts differ in size). The scale is computed
when the token is written, so what attention reads never depends on how a prompt was divided into chunks.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch

from inferplane.errors import UsageError
from inferplane.kvcache import int4, int4_spans
from inferplane.kvcache.blocked import BlockedKV, Zeros, make_zeros
from inferplane.types import KVLayout, KVRequest, LayerKV
from inferplane.types.qtensor import round_entries, scales


class KVDtype(NamedTuple):
    """How cache entries are stored.

    Args:
        dtype: torch dtype; None: the plan's dtype.
        limit: largest magnitude of a scaled entry; 0: entries are not scaled.
        error: largest rounding error relative to the largest entry of a group (half a step of the format).
    """

    dtype: torch.dtype | None
    limit: float
    error: float


KV_DTYPES: dict[str, KVDtype] = {
    "auto": KVDtype(None, 0.0, 0.0),
    "fp8": KVDtype(torch.float8_e4m3fn, 448.0, 16 / 448),
    "int8": KVDtype(torch.int8, 127.0, 0.5 / 127),
}
"""KV dtypes by name; "auto" is the plan's dtype."""
KV_DTYPE_NAMES = (*KV_DTYPES, *int4.DTYPES)
"""All that `paged_layout` knows; those of 4 bits are in `int4`."""

LATENT_GROUP = 64
"""Entries of a latent that share a scale. DeepSeek V3's 512 latent and 64 rotated entries are both multiples of it."""


def _group_shapes(request: KVRequest) -> list[tuple[int, int]]:
    """`(groups, size)` of a token's row in each tensor; a group has one scale if the cache is quantized."""
    shapes = []
    for *heads, dim in request.entry_shapes:
        size = LATENT_GROUP if not heads and dim % LATENT_GROUP == 0 else dim
        shapes.append((math.prod(heads) * (dim // size), size))
    return shapes


class PagedKV(BlockedKV):
    """A cache with entries `[slots, heads, dim]`, block after block, and scales `[slots, heads]` if quantized.

    There is one extra slot at the end. Slot -1, which marks padding, writes to it, and nothing reads it.

    Args:
        request: what the layer stores per token.
        blocks: number of blocks.
        block_tokens: tokens of a sequence that a block is for.
        layout: name of the layout.
        dtype: the plan's dtype, which `read` returns.
        device: device of the tensors.
        kv_dtype: a key of `KV_DTYPES`.
        power_of_two: whether scales are rounded up to powers of two, so that scaling is exact in any float format.
        zeros: allocates the tensors.
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
        zeros: Zeros = make_zeros,
    ) -> None:
        self.power_of_two = power_of_two
        if request.rate > 1:
            self.covered_tokens, block_tokens = block_tokens, request.entries_per_block(block_tokens)
        self.request, self.blocks, self.block_tokens, self.layout = request, blocks, block_tokens, layout
        self.dtype, self.spec = dtype, KV_DTYPES[kv_dtype]
        slots = blocks * block_tokens + 1
        shapes, stored_dtype = _group_shapes(request), self.spec.dtype or dtype
        self.entries = [zeros((slots, *shape), stored_dtype, device) for shape in shapes]
        scaled = shapes if self.spec.limit else ()
        self.scales = [zeros((slots, groups), torch.float32, device) for groups, _ in scaled]

    def view_blocks(self) -> tuple[torch.Tensor, ...]:
        """Views `[blocks, block_tokens, heads, dim]` of the entries, for kernels that know this layout."""
        return tuple(t[:-1].unflatten(0, (self.blocks, self.block_tokens)) for t in self.entries)

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        for i, (entry, value) in enumerate(zip(self.entries, values)):
            v = value.reshape(value.shape[0], *entry.shape[1:])
            if not self.scales:
                entry[slots] = v.to(entry.dtype)
                continue
            scale = scales(v.float().abs().amax(-1), self.spec.limit, self.power_of_two)
            entry[slots] = round_entries(v.float() / scale[..., None], entry.dtype, self.spec.limit)
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
        return tuple(v.view(len(v), *shape) for v, shape in zip(out, self.request.entry_shapes, strict=True))

    def list_tensors(self) -> tuple[torch.Tensor, ...]:
        """See `BlockedKV.list_tensors`; entries first, then scales, each `[blocks, block_tokens, ...]`."""
        n = (self.blocks, self.block_tokens)
        return tuple(t[:-1].unflatten(0, n) for t in (*self.entries, *self.scales))


def latents(kv: LayerKV) -> torch.Tensor:
    """Return a view `[blocks, block_tokens, latent + rotated]` of an unquantized latent cache in core's layout."""
    return cast(PagedKV, kv).view_blocks()[0].flatten(2)


def paged_layout(
    block_tokens: int,
    kv_dtype: str = "auto",
    *,
    power_of_two: bool = False,
    zeros: Zeros = make_zeros,
    in_spans: bool = False,
) -> KVLayout:
    """Describe core's layout with `block_tokens` tokens per block.

    It is named "paged_<tokens>" or "paged_<tokens>_<kv dtype>", with "_p2" at the end if scales are powers of two,
    "_spans" if entries of 4 bits lie in spans.

    Args:
        block_tokens: tokens per block, at least 1.
        kv_dtype: "auto" (the plan's dtype), "fp8", "int8", "int4", or "k8v4" (keys in int8, values in int4).
        power_of_two: whether to round scales up to powers of two: cheap and exact to apply, at up to twice the rounding
            error.
        zeros: allocates the tensors, `(shape, dtype, device)`; for devices with memory that suits a cache better.
        in_spans: whether entries of 4 bits lie as kernels read them that multiply bytes four by four
            (`Int4SpanKV`): "int4" and "k8v4", for keys and values of whole groups of 32 entries.

    Raises:
        UsageError: the KV dtype is unknown or has no spans, or `block_tokens` is less than 1.
    """
    if kv_dtype not in KV_DTYPE_NAMES:
        raise UsageError(f"Unknown KV dtype {kv_dtype!r}.", there_is=", ".join(sorted(KV_DTYPE_NAMES)))
    if block_tokens < 1:
        raise UsageError(f"A KV block of {block_tokens} tokens.", remedy="use at least 1")
    if in_spans and kv_dtype not in int4.DTYPES:
        raise UsageError(f"A KV cache in {kv_dtype} in spans.", there_is=", ".join(int4.DTYPES))
    if kv_dtype in int4.DTYPES:
        return _int4_layout(block_tokens, kv_dtype, zeros, in_spans)
    name = f"paged_{block_tokens}" + ("" if kv_dtype == "auto" else f"_{kv_dtype}") + ("_p2" if power_of_two else "")

    def build(request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        return PagedKV(request, blocks, block_tokens, name, dtype, device, kv_dtype, power_of_two, zeros)

    def bytes_per_block(request: KVRequest, dtype: torch.dtype) -> int:
        spec = KV_DTYPES[kv_dtype]
        size = (spec.dtype or dtype).itemsize
        scales = sum(4 * groups for groups, _ in _group_shapes(request)) if spec.limit else 0
        return request.entries_per_block(block_tokens) * (request.entries * size + scales)

    error = KV_DTYPES[kv_dtype].error * (2 if power_of_two else 1)
    return KVLayout(name, block_tokens, build, bytes_per_block, kv_dtype, error)


def list_kv_dtypes(request: KVRequest) -> tuple[str, ...]:
    """The names of `KV_DTYPE_NAMES` in which `paged_layout` stores what a layer requests."""
    names = KV_DTYPES if request.rate > 1 else KV_DTYPE_NAMES  # entries of 4 bits lie in spans of a block's tokens
    return tuple(name for name in names if name != "k8v4" or len(request.entry_shapes) == 2)


def _int4_layout(block_tokens: int, kv_dtype: str, zeros: Zeros, in_spans: bool) -> KVLayout:
    if block_tokens % int4.SPAN:
        what = f"A KV block of {block_tokens} tokens in {kv_dtype}."
        raise UsageError(what, remedy=f"use a multiple of {int4.SPAN}")
    name = f"paged_{block_tokens}_{kv_dtype}" + ("_spans" if in_spans else "")
    cache = int4_spans.Int4SpanKV if in_spans else int4.Int4KV

    def build(request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        return cache(request, blocks, block_tokens, name, dtype, device, kv_dtype, zeros)

    def bytes_per_block(request: KVRequest, dtype: torch.dtype) -> int:
        return block_tokens // int4.SPAN * int4.bytes_per_span(request, dtype, kv_dtype)

    span = int4.SPAN if kv_dtype == "int4" else 1
    return KVLayout(name, block_tokens, build, bytes_per_block, kv_dtype, int4.ERROR, span)
