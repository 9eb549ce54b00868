"""The states of sequences in a test case: stale ones, the slots that a step may write, and errors of what it wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from inferplane.binding.case import batch_in, same_entries
from inferplane.ops.op import relative_error
from inferplane.ops.oracle import to_host
from inferplane.types import HOST, Batch, HybridCache, KVCache, StateCache
from inferplane.types.state import PADDING_SLOT


def states_in(args: Iterable[Any]) -> list[StateCache]:
    """The layers' states among an op's arguments."""
    out: list[StateCache] = []
    for arg in args:
        if isinstance(arg, KVCache):
            out += arg.list_states()
        elif isinstance(arg, (HybridCache, StateCache)):
            out.append(arg.states if isinstance(arg, HybridCache) else arg)
    return out


def poison_states(args: tuple[Any, ...]) -> None:
    """Fill every slot from which the step may not read with NaN: an earlier owner may have left any bits there.

    Args:
        args: of an op. The step reads the states of sequences that have tokens before it.
    """
    caches, batch = states_in(args), batch_in(args)
    if not caches or batch is None:
        return
    lens = batch.lens()
    counts = [stop - start for start, stop in zip(lens.query_start, lens.query_start[1:])]
    slots = to_host(batch.list_states().read).tolist()
    read = {slot for slot, count, total in zip(slots, counts, lens.seq_lens) if total > count}
    for cache in caches:
        stale = torch.tensor([slot for slot in range(cache.slots) if slot not in read])
        for tensor in cache.tensors:
            tensor[stale.to(tensor.device)] = torch.nan


class WatchedStates:
    """The states among an op's arguments, before and after a kernel runs. Make one before it runs.

    Args:
        args: the op's arguments.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.caches = states_in(args)
        self.before = [cache.copy_to(HOST) for cache in self.caches]

    def describe_stray_write(self, batch: Batch | None) -> str:
        """In words, a slot that changed although the step does not write it; empty if there is none."""
        if not self.caches or batch is None:
            return ""
        written = {PADDING_SLOT, *to_host(batch.list_states().write).tolist()}
        for cache, old in zip(self.caches, self.before):
            for tensor, stored in zip(cache.tensors, old.tensors):
                same = same_entries(to_host(tensor), stored).flatten(1).all(1)
                if stray := sorted({*torch.where(~same)[0].tolist()} - written):
                    return f"it changed state slot {stray[0]}, which the step does not write"
        return ""

    def error(self, batch: Batch | None, ideal: tuple[Any, ...]) -> float:
        """Largest error of the states that the next step reads.

        Args:
            batch: the step.
            ideal: the oracle's arguments, after it ran.
        """
        worst = 0.0
        for cache, twin in zip(self.caches, states_in(ideal), strict=True):
            assert batch is not None
            rows = to_host(batch.list_states().write)
            for tensor, expected in zip(cache.tensors, twin.tensors):
                worst = max(worst, relative_error(to_host(tensor)[rows], expected[rows]))
        return worst
