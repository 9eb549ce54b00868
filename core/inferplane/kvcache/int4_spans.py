"""Core's cache of 4 bits in the order in which products of bytes take it: the numbers of `int4`, `SPAN` slots and a
head together. A processor with products of four bytes a lane (VNNI) multiplies sixteen lanes of 64 bytes as they lie.

A lane of keys is a slot and has four entries of it; a lane of values is an entry and has four slots of it. So neither
is transposed, and no lanes are added up. A byte has two entries of one slot, so that writing a slot reads nothing.
What was measured is in decision 0049.
"""

from __future__ import annotations

import math

import torch

from inferplane.errors import UsageError
from inferplane.kvcache.blocked import Zeros, make_zeros
from inferplane.kvcache.int4 import FINE_GROUP, GROUP, GROUPS, SPAN, Int4Entries, Int4KV
from inferplane.types import KVRequest

LANES, DEEP = 16, 4
"""Lanes of 64 bytes, and bytes of a lane."""


class SpanEntries(Int4Entries):
    """Entries of 4 bits as keys lie, uint8 `[spans, heads, dim / 8, slots, 4]`: the low half of byte i of chunk c is
    entry 8 c + i of its slot, the high half entry 8 c + 4 + i. Scales and minimums are float16
    `[spans, heads, groups, 2, slots]`.

    Args:
        shape: slots, of which the last one is that of padding, heads, and entries of each, whole groups of 32.
        device, zeros, group: see `Int4Entries`.
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device, zeros: Zeros, group: int = GROUP) -> None:
        slots, heads, self.dim = shape
        self.group = group
        spans = (slots - 1) // SPAN + 1  # the last one is that of padding
        self.tensors = [
            zeros((spans, heads, *self._lines()), torch.uint8, device),
            zeros((spans, heads, self.dim // group, 2, SPAN), torch.float16, device),
        ]

    def _lines(self) -> tuple[int, ...]:
        """The shape of a span's entries of a head."""
        return self.dim // (2 * DEEP), SPAN, DEEP

    def write(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Store rows `[T, heads, dim]`."""
        entries, ranges = self.round(x)
        span, slot = slots.long() // SPAN, slots.long() % SPAN  # -1 is in the last span
        self._store(self.tensors[0], span, slot, entries)
        self.tensors[1][span, :, :, :, slot] = ranges

    def _store(self, data: torch.Tensor, span: torch.Tensor, slot: torch.Tensor, entries: torch.Tensor) -> None:
        low, high = entries.unflatten(-1, (-1, 2, DEEP)).unbind(-2)
        data[span, :, :, slot] = low | high << 4

    def _entries(self, data: torch.Tensor) -> torch.Tensor:
        """The entries of spans, uint8 `[spans, slots, heads, dim]`."""
        return torch.stack((data & 15, data >> 4), -2).permute(0, 3, 1, 2, 4, 5).flatten(3)

    def decode(self, data: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
        """The values of whole spans of rows, float32 `[T, heads, dim]`."""
        return self.values(self._entries(data).flatten(0, 1), ranges.movedim(-1, 1).flatten(0, 1))


class SpanValues(SpanEntries):
    """Entries of 4 bits as values lie, uint8 `[spans, heads, slots / 4, dim / 32, 16, 4]`: the low half of byte t of
    lane l of line e is entry 32 e + l of slot t of the four, the high half entry 32 e + 16 + l. Ranges as `SpanEntries`
    has them.
    """

    def _lines(self) -> tuple[int, ...]:
        return SPAN // DEEP, self.dim // (2 * LANES), LANES, DEEP

    def _store(self, data: torch.Tensor, span: torch.Tensor, slot: torch.Tensor, entries: torch.Tensor) -> None:
        low, high = entries.unflatten(-1, (-1, 2, LANES)).unbind(-2)
        data[span, :, slot // DEEP, :, :, slot % DEEP] = low | high << 4

    def _entries(self, data: torch.Tensor) -> torch.Tensor:
        halves = torch.stack((data & 15, data >> 4), 4)  # [spans, heads, slots / 4, dim / 32, 2, 16, 4]
        return halves.permute(0, 2, 6, 1, 3, 4, 5).flatten(4).flatten(1, 2)


class Records:
    """Allocates what one layer stores so that all of a span and head lies together, but for float32 scales and what has
    no spans: a processor then reads a head's record from one page, and the heads of a span one after the other.

    Args:
        spans: their number, the last one that of padding. heads: KV heads.
        nbytes: bytes of a record. device: of the tensors. zeros: allocates them.
    """

    def __init__(self, spans: int, heads: int, nbytes: int, device: torch.device, zeros: Zeros) -> None:
        self.zeros = zeros
        self.data = zeros((spans, heads, nbytes), torch.uint8, device)
        self.used = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros of a shape `[spans, heads, ...]`, in the records if they have any."""
        if shape[0] != len(self.data) or len(shape) == 2:
            return self.zeros(shape, dtype, device)
        first = self.used
        self.used += math.prod(shape[2:]) * dtype.itemsize
        return self.data[..., first : self.used].view(dtype).unflatten(-1, shape[2:])


class Int4SpanKV(Int4KV):
    """As `Int4KV`, with entries of 4 bits in spans, in `Records`.

    Raises:
        UsageError: the layer stores something else than keys and values of whole groups of 32 entries.
    """

    DIFFERENCES = SpanEntries
    VALUES = SpanValues

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
        if not has_spans(request):
            raise UsageError(f"A KV cache in spans for {request}.", remedy="use it for heads of a multiple of 32")
        spans = blocks * block_tokens // SPAN + 1
        nbytes = SPAN * SpanValues.bytes_per_token(1, request.v_dim, GROUPS[kv_dtype])
        if kv_dtype == "int4":
            nbytes += SPAN * SpanEntries.bytes_per_token(1, request.dim, FINE_GROUP) + request.dim
        records = Records(spans, request.heads, nbytes, device, zeros)
        super().__init__(request, blocks, block_tokens, layout, dtype, device, kv_dtype, records)


def has_spans(request: KVRequest) -> bool:
    """Whether `Int4SpanKV` stores what a layer requests."""
    return len(request.entry_shapes) == 2 and all(shape[-1] % GROUP == 0 for shape in request.entry_shapes)
