"""Inputs for the oracle: arguments in float32 on the host, with caches in canonical form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from inferplane.types import HOST, Batch, KVCache, KVRequest, LayerKV, QTensor

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

    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        values = values if self.through is None else self.through(*values)
        real = slots >= 0
        for entry, value in zip(self.entries, values):
            entry[slots[real]] = value[real].float()

    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.read`."""
        place = torch.arange(tokens)
        slots = table.long()[place // self.block_tokens] * self.block_tokens + place % self.block_tokens
        return tuple(entry[slots] for entry in self.entries)


def to_host(value: Any, *, widen: bool = False) -> Any:
    """Copy tensors (also inside tuples, batches, QTensors) to the host; with `widen`, floats become float32.

    Calls `tensor.to(host)` first, because the host cannot read some devices' tensors directly.
    """
    if isinstance(value, torch.Tensor):
        t = value.detach().to(HOST).clone()
        return t.float() if widen and t.is_floating_point() else t
    if isinstance(value, QTensor):
        return value.to(HOST)
    if isinstance(value, tuple):
        return tuple(to_host(v, widen=widen) for v in value)
    if isinstance(value, Batch):
        moved = {f.name: to_host(getattr(value, f.name)) for f in fields(value) if f.name != "host_lens"}
        return replace(value, **moved)
    return value


def oracle_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments for the oracle: float32 host tensors, the batch on the host, caches as `OracleKV` with equal contents.

    Call it before the kernel runs, because the kernel changes the caches.
    """
    hosts = [to_host(a, widen=True) for a in args]
    batch = next((a for a in hosts if isinstance(a, Batch)), None)

    def mirror(kv: LayerKV) -> OracleKV:
        assert batch is not None, "a cache without a batch"
        top = int(batch.block_tables.max()) + 1
        twin = OracleKV(kv.request, kv.block_tokens, top * kv.block_tokens)
        lens = batch.lens()
        for i, n in enumerate(lens.seq_lens):
            if not n:
                continue
            original = next(a for a in args if isinstance(a, Batch))
            held = to_host(kv.read(original.block_tables[i], n), widen=True)
            place = torch.arange(n)
            slots = batch.block_tables[i].long()[place // kv.block_tokens] * kv.block_tokens + place % kv.block_tokens
            twin.write(slots, *held)
        return twin

    out = []
    for arg, host in zip(args, hosts):
        if isinstance(arg, LayerKV):
            host = mirror(arg)
        elif isinstance(arg, KVCache):
            host = KVCache(tuple(mirror(kv) for kv in arg.layers), arg.blocks, arg.block_tokens)
        out.append(host)
    return tuple(out)
