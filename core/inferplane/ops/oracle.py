"""Inputs for the oracle: arguments in float32 on the host, with caches in canonical form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from inferplane.ops.op import relative_error
from inferplane.types import (
    HOST,
    Batch,
    CompressedCache,
    CompressorCache,
    HybridCache,
    IndexedCache,
    KVCache,
    KVRequest,
    LayerKV,
    QTensor,
    Selection,
    StateCache,
    StateRows,
)

Stored = Callable[..., tuple[torch.Tensor, ...]]


class OracleKV(LayerKV):
    """A cache of canonical float32 entries by slot, filled with what another cache reads.

    Args:
        request: the layer's cache request.
        block_tokens: tokens per block, as in the other cache.
        slots: number of slots.
        through: applied to entries when they are written, to round them as another storage does; None: not rounded.
    """

    layout = "oracle"

    def __init__(self, request: KVRequest, block_tokens: int, slots: int, through: Stored | None = None) -> None:
        self.request, self.block_tokens, self.through = request, block_tokens, through
        self.entries = [torch.full((slots, *shape), float("nan")) for shape in request.entry_shapes]
        self.stored: Sequence[torch.Tensor] | None = None
        self.error = 0.0
        """Largest error, relative to the largest entry, of what was stored elsewhere; see `take_from`."""

    def take_from(self, stored: Sequence[torch.Tensor]) -> None:
        """Take what is written from now on from another cache, which has stored the same step already, and note its
        error: rounded differently by a hair, an entry moves to the next value of a coarse format.

        Args:
            stored: the other cache's entries by slot, float32.
        """
        self.stored = stored

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        values = values if self.through is None else self.through(*values)
        real = slots >= 0
        for i, (entry, value) in enumerate(zip(self.entries, values)):
            entry[slots[real]] = own = value[real].float()
            if self.stored is not None:
                entry[slots[real]] = other = self.stored[i][slots[real]]
                self.error = max(self.error, relative_error(other, own))

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        slots = self.slots_of(table, tokens)
        return tuple(entry[slots] for entry in self.entries)

    def slots_of(self, table: torch.Tensor, tokens: int) -> torch.Tensor:
        """Slots of a sequence's tokens, int64 `[tokens]`, by its block table."""
        place = torch.arange(tokens)
        return table.long()[place // self.block_tokens] * self.block_tokens + place % self.block_tokens


def to_host(value: Any, *, widen: bool = False) -> Any:
    """Copy tensors (also inside tuples, batches, QTensors) to the host; with `widen`, floats become float32.

    Calls `tensor.to(host)` first, because the host cannot read some devices' tensors directly.
    """
    if isinstance(value, torch.Tensor):
        t = value.detach().to(HOST).clone()
        return t.float() if widen and t.is_floating_point() else t
    if isinstance(value, QTensor):
        return value.to(HOST)
    if isinstance(value, Selection):
        return Selection(to_host(value.positions))
    if isinstance(value, StateRows):
        return StateRows(*(to_host(slots) for slots in value))
    if isinstance(value, tuple):
        return tuple(to_host(v, widen=widen) for v in value)
    if isinstance(value, Batch):
        moved = {f.name: to_host(getattr(value, f.name)) for f in fields(value) if f.name != "host_lens"}
        return replace(value, **moved)
    return value


def oracle_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments for the oracle: float32 host tensors, the batch on the host, caches as `OracleKV` with equal contents,
    copies of states.

    Call it before the kernel runs, because the kernel changes the caches.

    Args:
        args: a kernel's arguments.
    """
    step = next((a for a in args if isinstance(a, Batch)), None)

    def mirror(kv: LayerKV, number: int = 0) -> OracleKV:
        assert step is not None, "a cache without a batch"
        batch = step.for_table(number).for_entries(kv)
        tables = to_host(batch.block_tables)
        twin = OracleKV(kv.request, kv.block_tokens, (int(tables.max()) + 1) * kv.block_tokens)
        twin.covered_tokens = kv.covered_tokens
        for i, n in enumerate(batch.lens().seq_lens):
            if n:
                twin.write(twin.slots_of(tables[i], n), *to_host(kv.read(batch.block_tables[i], n), widen=True))
        return twin

    def mirror_states(states: StateCache) -> StateCache:
        return states.copy_to(HOST, torch.float32)

    def to_oracle(arg: Any) -> Any:
        if isinstance(arg, KVCache):
            return arg.convert(mirror, mirror_states)
        if isinstance(arg, HybridCache):
            return HybridCache(mirror(arg.kv), mirror_states(arg.states))
        if isinstance(arg, IndexedCache):
            return IndexedCache(mirror(arg.kv), arg.index_keys and mirror(arg.index_keys), to_host(arg.selection))
        if isinstance(arg, (CompressorCache, CompressedCache)):
            return arg.convert(mirror)
        if isinstance(arg, StateCache):
            return mirror_states(arg)
        return mirror(arg) if isinstance(arg, LayerKV) else to_host(arg, widen=True)

    return tuple(map(to_oracle, args))
