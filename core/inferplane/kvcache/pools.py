"""Divides the memory of a cache among pools of blocks, and gives out the blocks of each.

Most models have one pool (`inferplane.kvcache.tables`). Blocks of another pool hold entries of other sizes, so a block
of one cannot stand in for a block of another, and how many each has is decided when the cache is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inferplane.kvcache.allocator import BlockAllocator
from inferplane.kvcache.tables import TablePlan, Windows, blocks_held
from inferplane.types import KVRequest

STEP_TOKENS = 2048
"""Tokens of one step for which a pool has blocks beside the windows of all sequences."""

TYPICAL_TOKENS = 1024
"""Tokens of the sequences that all pools hold equally many of, where the budget does not hold longer ones. Of shorter
sequences blocks of the pools with windows run out first, of longer ones those of the others."""


@dataclass(frozen=True)
class PoolShape:
    """What the blocks of a pool hold.

    Args:
        windows: of the tables that take their blocks from it, in tokens; None: a layer attends to all tokens.
        block_bytes: bytes of a block, in all storages of the pool.
    """

    windows: Windows
    block_bytes: int

    def max_blocks(self, tokens: int, sequences: int, block_tokens: int) -> int:
        """The largest number of blocks that can be of use: those of `sequences` sequences of `tokens` tokens, and what
        their windows have passed, which a prefix may be found in.
        """
        return len(self.windows) * -(-tokens // block_tokens) * sequences


def describe_pools(
    tables: TablePlan, count_bytes: Callable[[Sequence[KVRequest]], int], drafted_bytes: int
) -> list[PoolShape]:
    """The pools of a plan.

    Args:
        tables: the plan.
        count_bytes: of a block in the storages of some requests.
        drafted_bytes: what a draft model keeps of each block of the first pool.
    """
    of_pools = enumerate(zip(tables.windows_by_pool(), tables.storages_by_pool()))
    return [PoolShape(w, count_bytes(storages) + (0 if pool else drafted_bytes)) for pool, (w, storages) in of_pools]


def bytes_of_tables(pools: Sequence[PoolShape]) -> int:
    """Bytes of one block for each table of a sequence."""
    return sum(len(shape.windows) * shape.block_bytes for shape in pools)


def divide_budget(
    pools: Sequence[PoolShape], budget_bytes: int, block_tokens: int, max_tokens: int, num_sequences: int
) -> tuple[int, ...]:
    """The number of blocks of each pool in a cache of at most `budget_bytes`; no more than can be of use.

    With one pool that is all the budget holds. With several each gets the blocks that one sequence of the longest
    length holds, and those that `num_sequences` sequences of one length hold with a step's tokens; both lengths are the
    largest that the budget allows. What is left goes to the first pool, whose tables grow with the sequences.

    Args:
        pools: what their blocks hold; the first has the widest window.
        budget_bytes: of the cache.
        block_tokens: tokens per block.
        max_tokens: largest number of tokens of a sequence.
        num_sequences: largest number of sequences at a time.
    """
    most = [shape.max_blocks(max_tokens, num_sequences, block_tokens) for shape in pools]
    if len(pools) > 1:
        blocks = _balance(pools, budget_bytes, block_tokens, max_tokens, num_sequences)
        blocks = [min(count, limit) for count, limit in zip(blocks, most)]
        budget_bytes -= sum(count * shape.block_bytes for count, shape in zip(blocks[1:], pools[1:]))
    else:
        blocks = [0]
    first = pools[0].block_bytes
    return (min(max(0, budget_bytes) // first, most[0]) if first else most[0], *blocks[1:])


def _balance(
    pools: Sequence[PoolShape], budget_bytes: int, block_tokens: int, max_tokens: int, num_sequences: int
) -> list[int]:
    """The blocks of each pool: at first for one sequence, as long as the budget allows, then for as many sequences of
    `TYPICAL_TOKENS` as it allows, then for as long ones; at least those of one sequence with one token, whatever the
    budget is.
    """

    def held(tokens: int) -> list[int]:
        return [blocks_held(shape.windows, tokens, 1, block_tokens) for shape in pools]

    def fits(counts: Sequence[int]) -> bool:
        return sum(count * shape.block_bytes for count, shape in zip(counts, pools)) <= budget_bytes

    alone = held(_find_most(max_tokens, lambda tokens: fits(held(tokens))))

    def needed(sequences: int, tokens: int) -> list[int]:
        step = -(-min(tokens, STEP_TOKENS) // block_tokens) - 1
        windowed = (sum(window is not None for window in shape.windows) for shape in pools)
        counts = (sequences * count + step * tables for count, tables in zip(held(tokens), windowed))
        return [max(least, count) for least, count in zip(alone, counts)]

    length = min(max_tokens, TYPICAL_TOKENS)
    if not fits(needed(1, length)):
        return alone
    sequences = _find_most(num_sequences, lambda n: fits(needed(n, length)))
    return needed(sequences, _find_most(max_tokens, lambda n: fits(needed(sequences, n))))


def _find_most(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number from 1 to `limit` for which something holds that holds for all smaller ones; 1 if none."""
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


class BlockPools:
    """The allocators of a cache's pools: which one a table takes blocks from, and numbers of all of them together.

    Args:
        pools: the allocators.
        pool_of: number of each table's pool; empty: every table takes blocks from the first.
    """

    def __init__(self, pools: Sequence[BlockAllocator], pool_of: Sequence[int] = ()) -> None:
        self.pools, self.pool_of = tuple(pools), tuple(pool_of)

    @classmethod
    def of(cls, totals: Sequence[int], pool_of: Sequence[int]) -> BlockPools:
        """Pools of so many blocks each, all free; `pool_of` as above."""
        return cls([BlockAllocator(total) for total in totals], pool_of)

    def list_allocators(self, num_tables: int) -> list[BlockAllocator]:
        """The allocator of each of so many tables."""
        return [self.pools[pool] for pool in self.pool_of or (0,) * num_tables]

    @property
    def first(self) -> BlockAllocator:
        """The allocator of the first table's pool."""
        return self.pools[0]

    @property
    def total(self) -> int:
        """Number of blocks."""
        return sum(pool.total for pool in self.pools)

    @property
    def free(self) -> int:
        """Number of blocks without reusable content."""
        return sum(pool.free for pool in self.pools)

    @property
    def cached(self) -> int:
        """Number of blocks without users whose content is known."""
        return sum(pool.cached for pool in self.pools)

    @property
    def used(self) -> int:
        """Number of blocks with at least one user."""
        return sum(pool.used for pool in self.pools)

    @property
    def available(self) -> int:
        """Number of free and cached blocks."""
        return sum(pool.available for pool in self.pools)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1, of the pool that is used most: requests wait when it is full."""
        return max(pool.used / pool.total for pool in self.pools)

    def clear(self) -> None:
        """Free every cached block."""
        for pool in self.pools:
            pool.clear()

    def check(self) -> None:
        """Raise AssertionError if an allocator's records contradict each other."""
        for pool in self.pools:
            pool.check()
