"""Core's KV cache with entries of 4 bits, in plain torch tensors: all of them ("int4"), or those of values alone beside
keys in int8 ("k8v4").

A group of entries of a token and head has a scale and a minimum in float16, so that it may lie on one side of zero.
Keys differ by token far less than by channel: of each span of `SPAN` slots the first key is stored in int8, and every
key as its difference from that, in smaller groups. Of latents, the rotated key part stays in the plan's dtype.

Source: KIVI, arXiv 2402.02750 (values are rounded by token; keys have channels of their own sizes). What was measured
is in decision 0044.
"""

from __future__ import annotations

from functools import partial

import torch

from inferplane.errors import UsageError
from inferplane.kvcache.blocked import BlockedKV, Zeros, make_zeros
from inferplane.types import KVRequest
from inferplane.types.qtensor import round_entries, scales

FINE_GROUP, GROUP = 16, 32
"""Entries that share a scale and a minimum: of keys, and of values beside keys in int8; and of others."""
GROUPS = {"int4": GROUP, "k8v4": FINE_GROUP}
"""Those of values, by KV dtype."""
SPAN = 16
"""Slots whose keys are stored as differences from the first of them."""
TOP = 15.0
FLOAT16_MAX = torch.finfo(torch.float16).max
INT8_TOP = 127.0
DTYPES = ("int4", "k8v4")
"""KV dtypes that are stored so."""
ERROR = 0.14
"""Largest error of an entry relative to the largest of its row: half of a fifteenth of the range of a difference, which
is at most four times that, and what float16 adds."""


class PlainEntries:
    """Entries in the plan's dtype, `[slots, heads, dim]`."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, zeros: Zeros) -> None:
        self.tensors = [zeros(shape, dtype, device)]

    @staticmethod
    def bytes_per_token(heads: int, dim: int, dtype: torch.dtype) -> int:
        """Bytes of a token's entries."""
        return heads * dim * dtype.itemsize

    def write(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Store rows `[T, heads, dim]`."""
        self.tensors[0][slots] = x.to(self.tensors[0].dtype)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        """The values of stored rows, float32 `[T, heads, dim]`."""
        return data.float()


class Int8Entries:
    """Entries of 8 bits `[slots, heads, dim]`, and scales float32 `[slots, heads]`."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device, zeros: Zeros) -> None:
        self.tensors = [zeros(shape, torch.int8, device), zeros(shape[:2], torch.float32, device)]

    @staticmethod
    def bytes_per_token(heads: int, dim: int) -> int:
        """Bytes of a token's entries and scales."""
        return heads * (dim + 4)

    def write(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Store rows `[T, heads, dim]`."""
        data, stored = self.tensors
        scale = scales(x.float().abs().amax(-1), INT8_TOP)
        data[slots] = round_entries(x.float() / scale[..., None], torch.int8, INT8_TOP)
        stored[slots] = scale

    def decode(self, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The values of stored rows, float32 `[T, heads, dim]`."""
        return data.float() * scale[..., None]


class Int4Entries:
    """Entries of 4 bits, two in a byte, the first in the low half: uint8 `[slots, heads, groups * group / 2]`, and
    scales and minimums, float16 `[slots, heads, groups, 2]`. A row is filled up to whole groups with its last entry.

    Args:
        shape: slots, heads and entries of each. device: of the tensors. zeros: allocates them.
        group: entries that share a scale and a minimum; even.
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device, zeros: Zeros, group: int = GROUP) -> None:
        slots, heads, dim = shape
        self.dim, self.group = dim, group
        groups = -(-dim // group)
        self.tensors = [
            zeros((slots, heads, groups * group // 2), torch.uint8, device),
            zeros((slots, heads, groups, 2), torch.float16, device),
        ]

    @staticmethod
    def bytes_per_token(heads: int, dim: int, group: int = GROUP) -> int:
        """Bytes of a token's entries, scales and minimums."""
        return heads * -(-dim // group) * (group // 2 + 4)

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries of rows `[T, heads, dim]`, uint8 `[T, heads, groups * group]`, and their scales and minimums,
        float16 `[T, heads, groups, 2]`."""
        h = x.float()
        if missing := -self.dim % self.group:
            h = torch.cat((h, h[..., -1:].expand(*h.shape[:-1], missing)), -1)
        tiles = h.unflatten(-1, (-1, self.group))
        least, most = tiles.aminmax(dim=-1)
        # What float16 does not hold saturates; infinities and NaN stay, and make the group's values NaN.
        scale = ((most - least) / TOP).half()
        minimum = torch.where(least.isfinite(), least.clamp(-FLOAT16_MAX, FLOAT16_MAX), least).half()
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        steps = (tiles - minimum.float()[..., None]) / scale.float()[..., None]
        entries = steps.round().clamp(0, TOP).nan_to_num(0.0).to(torch.uint8).flatten(-2)
        return entries, torch.stack((scale, minimum), -1)

    def values(self, entries: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
        """What `round` rounded to, float32 `[T, heads, dim]`."""
        scale, minimum = ranges.float()[..., None].unbind(-2)
        return (entries.unflatten(-1, (-1, self.group)).float() * scale + minimum).flatten(-2)[..., : self.dim]

    def write(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Store rows `[T, heads, dim]`."""
        entries, ranges = self.round(x)
        low, high = entries.unflatten(-1, (-1, 2)).unbind(-1)
        self.tensors[0][slots] = low | high << 4
        self.tensors[1][slots] = ranges

    def decode(self, data: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
        """The values of stored rows, float32 `[T, heads, dim]`."""
        return self.values(torch.stack((data & 15, data >> 4), -1).flatten(-2), ranges)


class Int4Keys:
    """Differences of keys from the first one of their span, as `Int4Entries`, and the first ones, as `Int8Entries` with
    a row for each span. Slots of a span are written in order: the first one before the others, or with them.

    Args:
        shape: slots, of which the last one is that of padding, heads and entries of each. device: of the tensors.
        zeros: allocates them. entries: how differences are stored.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        device: torch.device,
        zeros: Zeros,
        entries: type[Int4Entries] = Int4Entries,
    ) -> None:
        slots, heads, dim = shape
        self.spans = (slots - 1) // SPAN
        self.differences = entries(shape, device, zeros, FINE_GROUP)
        self.firsts = Int8Entries((self.spans + 1, heads, dim), device, zeros)
        self.tensors = [*self.differences.tensors, *self.firsts.tensors]

    @staticmethod
    def bytes_per_span(heads: int, dim: int) -> int:
        """Bytes of a span."""
        return SPAN * Int4Entries.bytes_per_token(heads, dim, FINE_GROUP) + Int8Entries.bytes_per_token(heads, dim)

    def write(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Store rows `[T, heads, dim]`."""
        slots = slots.long()
        span = torch.where(slots >= 0, slots // SPAN, self.spans)
        self.firsts.write(torch.where(slots % SPAN == 0, span, self.spans), x)
        first = self.firsts.decode(*(t[span] for t in self.firsts.tensors))
        self.differences.write(slots, x.float() - first)

    def decode(
        self, data: torch.Tensor, ranges: torch.Tensor, first: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """The values of whole spans of rows, float32 `[T, heads, dim]`, each with the first row of its span."""
        return self.differences.decode(data, ranges) + self.firsts.decode(first, scale).repeat_interleave(SPAN, 0)


Entries = PlainEntries | Int8Entries | Int4Entries | Int4Keys


def check_request(request: KVRequest, kv_dtype: str) -> None:
    """Raise UsageError where entries cannot be stored so."""
    if kv_dtype == "k8v4" and len(request.entry_shapes) != 2:
        raise UsageError(
            f"kv_cache_dtype = 'k8v4' for a cache of kind {request.kind!r}, which has no values beside its keys.",
            remedy="use int8 or int4",
        )


class Int4KV(BlockedKV):
    """A cache whose entries take 4 bits, or whose values alone do. Blocks are as in `PagedKV`, with its extra slot.

    Args:
        request: what the layer stores per token.
        blocks: number of blocks.
        block_tokens: tokens per block.
        layout: name of the layout.
        dtype: the plan's dtype, which `read` returns.
        device: device of the tensors.
        kv_dtype: one of `DTYPES`.
        zeros: allocates the tensors.

    Raises:
        UsageError: see `check_request`.
    """

    DIFFERENCES: type[Int4Entries] = Int4Entries
    """How differences of keys are stored."""
    VALUES: type[Int4Entries] = Int4Entries
    """How values are stored."""

    def __init__(
        self,
        request: KVRequest,
        blocks: int,
        block_tokens: int,
        layout: str,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: str,
        zeros: Zeros = make_zeros,
    ) -> None:
        check_request(request, kv_dtype)
        self.request, self.blocks, self.block_tokens, self.layout = request, blocks, block_tokens, layout
        self.dtype = dtype
        slots = blocks * block_tokens + 1
        self.parts: list[Entries] = []
        if request.kind == "mla":
            latents = slots, 1, request.dim - request.rope
            self.parts.append(Int4Entries(latents, device, zeros))
            if request.rope:
                self.parts.append(PlainEntries((slots, 1, request.rope), dtype, device, zeros))
            return
        for number, shape in enumerate(request.entry_shapes):
            whole = slots, *_count_heads(shape)
            if number == 0 and len(request.entry_shapes) == 2:
                keys = Int8Entries if kv_dtype == "k8v4" else partial(Int4Keys, entries=self.DIFFERENCES)
                self.parts.append(keys(whole, device, zeros))
            else:
                self.parts.append(self.VALUES(whole, device, zeros, GROUPS[kv_dtype]))

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        if self.request.kind == "mla":
            (row,) = values
            values = row[:, None].split((self.request.dim - self.request.rope, self.request.rope), -1)
        for part, value in zip(self.parts, values):
            part.write(slots, value if value.ndim == 3 else value.reshape(len(value), -1, value.shape[-1]))

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        blocks = table[: -(-tokens // self.block_tokens)].long()
        found = [
            part.decode(*(self._view(t)[blocks].flatten(0, 1) for t in part.tensors))[:tokens].to(self.dtype)
            for part in self.parts
        ]
        if self.request.kind == "mla":
            found = [torch.cat(found, -1)]
        return tuple(x.view(len(x), *shape) for x, shape in zip(found, self.request.entry_shapes, strict=True))

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:-1].unflatten(0, (self.blocks, -1))

    def list_tensors(self) -> tuple[torch.Tensor, ...]:
        """See `BlockedKV.list_tensors`; those of each part in order, `[blocks, block_tokens or spans, ...]`."""
        return tuple(self._view(t) for part in self.parts for t in part.tensors)


def bytes_per_span(request: KVRequest, dtype: torch.dtype, kv_dtype: str) -> int:
    """Bytes of the entries of `SPAN` tokens with their scales.

    Args:
        request: what the layer stores per token.
        dtype: the plan's dtype.
        kv_dtype: one of `DTYPES`.

    Raises:
        UsageError: see `check_request`.
    """
    check_request(request, kv_dtype)
    if request.kind == "mla":
        latents = Int4Entries.bytes_per_token(1, request.dim - request.rope)
        return SPAN * (latents + PlainEntries.bytes_per_token(1, request.rope, dtype))
    shapes = [_count_heads(shape) for shape in request.entry_shapes]
    if len(shapes) != 2:
        return SPAN * sum(Int4Entries.bytes_per_token(*shape) for shape in shapes)
    keys = SPAN * Int8Entries.bytes_per_token(*shapes[0]) if kv_dtype == "k8v4" else Int4Keys.bytes_per_span(*shapes[0])
    return keys + SPAN * Int4Entries.bytes_per_token(*shapes[1], GROUPS[kv_dtype])


def _count_heads(shape: tuple[int, ...]) -> tuple[int, int]:
    """Heads and entries of each."""
    *heads, dim = shape
    count = 1
    for size in heads:
        count *= size
    return count, dim
