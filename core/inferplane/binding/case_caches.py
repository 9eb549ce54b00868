"""The caches of keys and values in a test case: slots that a step may write, what a kernel stored, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from inferplane.binding.case import Caches, caches_in, same_entries, views_in
from inferplane.ops.op import relative_error
from inferplane.ops.oracle import OracleKV, to_host
from inferplane.types import (
    HOST,
    CompressedCache,
    CompressorCache,
    HybridCache,
    IndexedCache,
    KVCache,
    KVLayout,
    LayerKV,
    StateCache,
)


class WatchedCaches:
    """The caches among an op's arguments, before and after a kernel runs. Make one before it runs.

    Args:
        args: the op's arguments.
        caches: built them.
    """

    def __init__(self, args: tuple[Any, ...], caches: Caches) -> None:
        self.caches, self.read_all, self.layouts = caches_in(args), caches.read_all, caches.layouts
        self.views = views_in(args)
        self.before = [self.read_all(kv) for kv in self.caches]

    def describe_stray_write(self, writes: bool) -> str:
        """In words, a slot that changed although the step does not write it; empty if there is none.

        Args:
            writes: whether the op writes caches.
        """
        for kv, view, stored in zip(self.caches, self.views, self.before, strict=True):
            slots = to_host(view.slots)
            dependents = self.layouts[kv.request].find_dependents(slots[slots >= 0]) if writes else ()
            written = {int(slot) for slot in dependents}
            if stray := _find_stray_write(stored, self.read_all(kv), written, kv.block_tokens):
                return stray
        return ""

    def lead(self, ideal: Iterable[Any]) -> None:
        """Let the oracle attend to the step's entries as the kernel stored them, where storing rounds them coarsely.

        Args:
            ideal: the oracle's arguments, before it runs.
        """
        for kv, twin in zip(self.caches, _twins_in(ideal), strict=True):
            if self.layouts[kv.request].tolerance:
                twin.take_from(self.read_all(kv))

    def error(self, ideal: tuple[Any, ...]) -> float:
        """Largest error of the entries that were written, and of those that later steps may read.

        Args:
            ideal: the oracle's arguments, after it ran.
        """
        worst = 0.0
        twins = zip(_twins_in(ideal), views_in(ideal), strict=True)
        for (kv, batch), (twin, host) in zip(zip(self.caches, self.views, strict=True), twins, strict=True):
            worst = max(worst, twin.error)
            for i, (first, last, n) in host.list_spans():
                table = host.block_tables[i]
                skipped = kv.request.blocks_before_window(last - first, n, kv.block_tokens)
                n -= skipped * kv.block_tokens
                stored = to_host(kv.read(batch.block_tables[i, skipped:], n), widen=True)
                expected = twin.read(table[skipped:], n)
                for s, e in zip(stored, expected, strict=True):
                    worst = max(worst, relative_error(s, e))
        return worst

    def rounding(self, dtype: torch.dtype) -> float:
        """The largest `round_trip_error` of the caches.

        Args:
            dtype: the plan's.
        """
        return max((round_trip_error(self.layouts[kv.request], dtype) for kv in self.caches), default=0.0)


def round_trip_error(layout: KVLayout, dtype: torch.dtype) -> float:
    """Largest relative error of an entry written and read: the layout's, and one rounding to the plan's dtype."""
    return layout.tolerance + torch.finfo(dtype).eps / 2 if layout.tolerance else 0.0


def host_arguments(args: tuple[Any, ...], ideal: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments for the body in the plan's dtype on the host; its results have the shapes and dtypes that a kernel must
    return.

    Args:
        args: of a kernel. ideal: the oracle's, before it runs.
    """
    out = []
    for arg, other in zip(args, ideal, strict=True):
        if isinstance(arg, torch.Tensor):
            out.append(to_host(arg))
        elif isinstance(other, OracleKV):
            out.append(_copy_cache(other))
        elif isinstance(other, HybridCache):
            out.append(HybridCache(_copy_cache(other.kv), arg.states.copy_to(HOST)))
        elif isinstance(other, IndexedCache):
            keys = None if other.index_keys is None else _copy_cache(other.index_keys)
            out.append(IndexedCache(_copy_cache(other.kv), keys, to_host(other.selection)))
        elif isinstance(other, (CompressorCache, CompressedCache)):
            out.append(other.convert(lambda kv, table: _copy_cache(kv)))
        elif isinstance(other, StateCache):
            out.append(arg.copy_to(HOST))
        elif isinstance(other, KVCache):
            out.append(arg.convert(_copy_of(other), lambda states: states.copy_to(HOST)))
        else:
            out.append(other)
    return tuple(out)


def _copy_of(ideal: KVCache) -> Callable[[LayerKV, int], OracleKV]:
    """A function that returns copies of the oracle's caches, one after another."""
    twins = iter(ideal.layers)
    return lambda kv, table: _copy_cache(next(twins))


def _copy_cache(kv: Any) -> OracleKV:
    twin = OracleKV(kv.request, kv.block_tokens, kv.entries[0].shape[0])
    twin.covered_tokens = kv.covered_tokens
    twin.entries = [e.clone() for e in kv.entries]
    return twin


def _twins_in(ideal: Iterable[Any]) -> list[OracleKV]:
    return [kv for kv in caches_in(ideal) if isinstance(kv, OracleKV)]


def _find_stray_write(
    before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], named: set[int], block_tokens: int
) -> str:
    """In words, a slot that changed although the step does not name it; empty if there is none.

    Args:
        before: all entries of a cache by slot. after: the same after the call.
        named: slots that may change.
        block_tokens: tokens per block.
    """
    for old, new in zip(before, after, strict=True):
        same = same_entries(old, new).flatten(1).all(1)
        slots = sorted(set(torch.where(~same)[0].tolist()) - named)
        if slots:
            block, offset = divmod(slots[0], block_tokens)
            more = f" and {len(slots) - 1} more" if len(slots) > 1 else ""
            return f"it wrote slot {slots[0]} (block {block}, offset {offset}){more}, which the step does not name"
    return ""
