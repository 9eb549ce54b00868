"""The other side of a comparison: a cache in float32 on the host, and arguments turned into the oracle's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from inferplane.types import HOST, Batch, KVCache, KVRequest, LayerKV, QTensor

Stored = Callable[..., tuple[torch.Tensor, ...]]


class OracleKV(LayerKV):
    """Canonical float32 entries by slot, filled with what another cache reads: the representation's own values.

    Args:
        request: what the layer remembers.
        block_tokens: tokens a block, as in the cache it stands for.
        slots: number of slots.
        through: what a storage makes of entries when it keeps them; None keeps them as they are.
    """

    layout = "oracle"

    def __init__(self, request: KVRequest, block_tokens: int, slots: int, through: Stored | None = None) -> None:
        self.request, self.block_tokens, self.through = request, block_tokens, through
        shapes = (
            [(request.dim,)]
            if request.kind == "mla"
            else [(request.heads, request.dim), (request.heads, request.v_dim)]
        )
        self.entries = [torch.full((slots, *s), float("nan")) for s in shapes]

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

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `LayerKV.copy_blocks`."""
        for entry in self.entries:
            for a, b in zip(source.tolist(), target.tolist()):
                n = self.block_tokens
                entry[b * n : (b + 1) * n] = entry[a * n : (a + 1) * n]

    def export(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.export`."""
        return tuple(e.view(-1, self.block_tokens, *e.shape[1:])[blocks.long()] for e in self.entries)

    def load(self, blocks: torch.Tensor, stored: tuple[torch.Tensor, ...]) -> None:
        """See `LayerKV.load`."""
        for entry, value in zip(self.entries, stored):
            entry.view(-1, self.block_tokens, *entry.shape[1:])[blocks.long()] = value.float()


def to_host(value: Any, *, widen: bool = False) -> Any:
    """Tensors (also inside tuples, batches, QTensors) as plain host tensors; with `widen`, floats become float32.

    Goes through `tensor.to(host)`, so that devices whose tensors the host may not read are copied first.
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

    Call it before the kernel runs, which changes the caches.
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
