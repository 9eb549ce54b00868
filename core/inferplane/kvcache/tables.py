"""Deals a model's layers to block tables: layers with a window need not keep what other layers keep.

A *cache group* is all layers with the same window. A sequence has at least one block table for each group, from which
blocks before the window are released while it grows. Tables of layers whose entries have one form take their blocks
from one pool: a block holds `block_tokens` tokens of n layers, those of the table that has it. So the memory of the
pool is n storages, which the layers of every table share in order. A group with more than n layers has several tables;
a last table with fewer leaves storages of its blocks unused, which is limited (`MAX_PADDING`). A group whose entries
have other forms has a pool of its own, with one table (`inferplane.kvcache.pools` divides the memory among pools).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from inferplane.types import KVRequest

MAX_PADDING = 0.1
"""Largest share by which tables with fewer layers than others may enlarge the cache of short sequences."""
MAX_WIDEST_PADDING = 0.03
"""The same for the group with the widest window alone, which has most blocks when sequences are long."""

INDEX_KEYS = "index_keys"
"""The kind of what a layer keeps beside its entries, in the same table, and in a storage of its own."""
SHARED_KV, COMPRESSOR_ROWS = "shared_kv", ("compressor_rows", "index_rows")
"""The kinds of entries that are keys and values, and of what compressors make them and index keys from."""
Windows = Sequence[int | None]
"""The widest window of the layers of each block table, in tokens; None: a layer attends to all."""


def widest_window(windows: Windows) -> int | None:
    """The widest of some windows, in tokens; None if one is None; 0 if there are none."""
    return None if None in windows else max((w for w in windows if w is not None), default=0)


def blocks_held(windows: Windows, tokens: int, step_tokens: int, block_tokens: int) -> int:
    """The largest number of blocks that a sequence holds at a time, in all its tables.

    Before a step, with a window, these are blocks for the step's tokens and for the window of the first of them, which
    begin and end anywhere in a block.

    Args:
        windows: of each table.
        tokens: of the sequence.
        step_tokens: largest number of its tokens in a step.
        block_tokens: tokens per block.
    """
    all_blocks = -(-tokens // block_tokens)
    return sum(
        all_blocks if w is None else min(all_blocks, -(-(w + step_tokens - 2) // block_tokens) + 1) for w in windows
    )


@dataclass(frozen=True)
class TablePlan:
    """Which block table each layer reads, and where its entries lie.

    Args:
        windows: of each table; the first is the widest.
        table_of: number of each layer's table; drafting layers come after the model's and have table 0. A layer with
            index keys occurs twice in a row.
        storage_of: number of each layer's storage.
        storages: what each storage stores; a block has memory in all of its pool.
        reason: in words, why layers with a window share the table of layers that keep more; empty: none do.
        pool_of: number of each table's pool; empty: there is one.
        pool_of_storage: number of each storage's pool; empty: there is one.
    """

    windows: tuple[int | None, ...]
    table_of: tuple[int, ...]
    storage_of: tuple[int, ...]
    storages: tuple[KVRequest, ...]
    reason: str = ""
    pool_of: tuple[int, ...] = ()
    pool_of_storage: tuple[int, ...] = ()

    @property
    def num_tables(self) -> int:
        """Number of block tables of a sequence."""
        return len(self.windows)

    def list_pools(self) -> tuple[int, ...]:
        """The number of each table's pool."""
        return self.pool_of or (0,) * self.num_tables

    def windows_by_pool(self) -> list[Windows]:
        """The windows of the tables of each pool."""
        numbers = self.list_pools()
        return [tuple(w for w, own in zip(self.windows, numbers) if own == pool) for pool in range(1 + max(numbers))]

    def list_storage_pools(self) -> tuple[int, ...]:
        """The number of each storage's pool."""
        return self.pool_of_storage or (0,) * len(self.storages)

    def storages_by_pool(self) -> list[tuple[KVRequest, ...]]:
        """What the storages of each pool store."""
        numbers, pools = self.list_storage_pools(), range(1 + max(self.list_pools()))
        return [tuple(r for r, own in zip(self.storages, numbers) if own == pool) for pool in pools]

    def data(self) -> dict[str, Any]:
        """The tables as JSON-ready data, for `explain` and `estimate`."""
        rows = zip(self.windows, self.count_layers(), self.list_pools())
        tables = [{"window": window, "layers": n, "pool": pool} for window, n, pool in rows]
        data: dict[str, Any] = {"tables": tables, "shared_because": self.reason}
        with_keys = sum(request.kind == INDEX_KEYS for request in self.storages)
        return {**data, "index_keys": with_keys} if with_keys else data

    def count_layers(self) -> tuple[int, ...]:
        """The number of layers of each table."""
        kinds = [self.storages[storage].kind for storage in self.storage_of]
        beside = {INDEX_KEYS, *COMPRESSOR_ROWS}
        tables = [table for table, kind in zip(self.table_of, kinds) if kind not in beside]
        alone = [table for table, kind in zip(self.table_of, kinds) if kind == COMPRESSOR_ROWS[0]]
        return tuple(tables.count(table) or alone.count(table) for table in range(self.num_tables))


def single_table(requests: Sequence[KVRequest], also: Sequence[KVRequest] = (), reason: str = "") -> TablePlan:
    """One block table for all layers.

    Args:
        requests: of the layers; none: no layer reads a block, so the table keeps none but that of the next token.
        also: of layers elsewhere that read the same table.
        reason: see `TablePlan`.
    """
    window = widest_window([r.window for r in (*requests, *also)]) if requests or also else 1
    return TablePlan((window,), (0,) * len(requests), tuple(range(len(requests))), tuple(requests), reason)


def deal_layers(
    requests: Sequence[KVRequest],
    drafting: Sequence[KVRequest] = (),
    also: Sequence[KVRequest] = (),
    form: Callable[[KVRequest], Hashable] = lambda request: replace(request, window=None),
) -> TablePlan:
    """Deal layers to block tables, and tables to pools.

    If only one window occurs, all layers share one table. Otherwise groups whose layers all have entries of the same
    one form share a pool and its storages; every other group has one table, in a pool of its own.

    Args:
        requests: of the model's layers.
        drafting: of layers behind the model, which read the first table and have storages of their own.
        also: of a draft model's layers, which read the first table in a cache of their own.
        form: what has to be equal for two layers to share a storage: by default all but the window.
    """
    groups: dict[int | None, list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(request.window, []).append(i)
    if len(groups) < 2:
        keeps_more = widest_window([r.window for r in (*drafting, *also)]) is None and None not in groups
        reason = "a layer that drafts reads the same table and has none" if keeps_more else ""
        return single_table((*requests, *drafting), also, reason)
    windows: list[int | None] = []
    pool_of: list[int] = []
    stored: list[KVRequest] = []
    pool_of_storage: list[int] = []
    table_of, storage_of = [0] * len(requests), [0] * len(requests)
    for pool, members in enumerate(_pool_groups(groups, requests, form)):
        width, base = members.width, len(stored)
        for window in members.windows:
            layers = groups[window]
            for first in range(0, len(layers), width):
                for place, layer in enumerate(layers[first : first + width]):
                    table_of[layer], storage_of[layer] = len(windows), base + place
                    stored += [requests[layer]] if base + place == len(stored) else []
                windows.append(window)
                pool_of.append(pool)
        pool_of_storage += [pool] * (len(stored) - base)
    windows[0] = widest_window([windows[0], *(r.window for r in (*drafting, *also))])
    own = range(len(stored), len(stored) + len(drafting))
    return TablePlan(
        tuple(windows),
        (*table_of, *(0 for _ in drafting)),
        (*storage_of, *own),
        (*stored, *drafting),
        "",
        tuple(pool_of),
        (*pool_of_storage, *(0 for _ in drafting)),
    )


class _Members(NamedTuple):
    """The windows of the groups in a pool, the widest first, and the number of layers of each of their tables."""

    windows: list[int | None]
    width: int


def _pool_groups(
    groups: Mapping[int | None, Sequence[int]], requests: Sequence[KVRequest], form: Callable[[KVRequest], Hashable]
) -> list[_Members]:
    """The groups of each pool; the pool that has the widest window comes first."""
    pools: dict[Hashable, list[int | None]] = {}
    for window in sorted(groups, key=lambda w: math.inf if w is None else w, reverse=True):
        forms = {form(requests[layer]) for layer in groups[window]}
        pools.setdefault(("one", *forms) if len(forms) == 1 else ("several", window), []).append(window)

    def width(key: Hashable, windows: Sequence[int | None]) -> int:
        counts = [len(groups[window]) for window in windows]
        return choose_width(counts) if isinstance(key, tuple) and key[0] == "one" else counts[0]

    return [_Members(windows, width(key, windows)) for key, windows in pools.items()]


def choose_width(counts: Sequence[int]) -> int:
    """The number of layers per table: the one with the fewest tables, and the fewest unused storages among these.

    Args:
        counts: layers of each group, that with the widest window first.
    """

    def stored(count: int, width: int) -> int:
        return -(-count // width) * width

    def wasteful(width: int) -> bool:
        return stored(counts[0], width) > (1 + MAX_WIDEST_PADDING) * counts[0] or (
            sum(stored(n, width) for n in counts) > (1 + MAX_PADDING) * sum(counts)
        )

    widths = [width for width in range(1, max(counts) + 1) if not wasteful(width)]
    return min(widths, key=lambda n: (sum(-(-count // n) for count in counts), sum(stored(c, n) for c in counts)))
