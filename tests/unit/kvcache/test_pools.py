"""The memory of a cache is divided so that no pool is full long before the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferplane.kvcache import BlockAllocator, BlockPools, PoolShape, blocks_held, bytes_of_tables, divide_budget
from inferplane.kvcache.pools import STEP_TOKENS, TYPICAL_TOKENS

BLOCK = 16


def test_one_pool_has_all_that_the_budget_holds():
    shape = PoolShape((None, 8), 100)
    assert divide_budget([shape], 4999, BLOCK, 160, 4) == (49,)
    assert divide_budget([shape], 10**6, BLOCK, 160, 4) == (2 * 10 * 4,), "no more than can be of use"
    assert divide_budget([PoolShape((None,), 0)], 0, BLOCK, 160, 4) == (40,), "blocks without entries take no memory"


SHAPES = st.lists(
    st.builds(PoolShape, st.lists(st.integers(1, 60), min_size=1, max_size=3).map(tuple), st.integers(1, 500)),
    min_size=1,
    max_size=2,
)


@given(SHAPES, st.integers(1, 500), st.integers(0, 3_000_000), st.integers(1, 400), st.integers(1, 50))
def test_the_budget_is_kept_and_every_pool_holds_the_same_sequences(more, first_bytes, budget, tokens, sequences):
    shapes = [PoolShape((None,), first_bytes), *more]
    blocks = divide_budget(shapes, budget, BLOCK, tokens, sequences)
    if budget < bytes_of_tables(shapes):
        assert not all(blocks), "the cache is refused"
        return
    assert all(blocks) and sum(n * s.block_bytes for n, s in zip(blocks, shapes)) <= budget
    alone = max(n for n in range(1, tokens + 1) if _bytes(shapes, 1, n, step=False) <= budget)
    together = max((n for n in range(1, tokens + 1) if _bytes(shapes, sequences, n, alone) <= budget), default=0)
    for count, shape in zip(blocks, shapes):
        assert count <= shape.max_blocks(tokens, sequences, BLOCK)
        assert count >= blocks_held(shape.windows, alone, 1, BLOCK), "the longest sequence that the budget allows fits"
        if together >= min(tokens, TYPICAL_TOKENS):
            assert count >= sequences * blocks_held(shape.windows, together, 1, BLOCK)


def _bytes(shapes, sequences, tokens, alone=1, step=True):
    """Bytes of the blocks for so many sequences of a length, and for a step; at least those of one of a length."""
    most = 0
    for shape in shapes:
        windows = sum(window is not None for window in shape.windows)
        count = sequences * blocks_held(shape.windows, tokens, 1, BLOCK)
        count += step * windows * (-(-min(tokens, STEP_TOKENS) // BLOCK) - 1)
        most += shape.block_bytes * max(count, blocks_held(shape.windows, alone, 1, BLOCK))
    return most


def test_tables_take_blocks_from_their_pool():
    pools = BlockPools([BlockAllocator(4), BlockAllocator(8)], (0, 1, 1))
    first, second, third = pools.list_allocators(3)
    assert second is third and first is not second
    first.allocate(3)
    second.allocate(2)
    assert (pools.total, pools.used, pools.free, pools.available, pools.cached) == (12, 5, 7, 7, 0)
    assert pools.usage == pytest.approx(3 / 4), "of the pool that is used most"
    pools.check()


def test_without_numbers_all_tables_share_the_first_pool():
    pools = BlockPools([BlockAllocator(4)])
    assert pools.list_allocators(3) == [pools.pools[0]] * 3


def test_more_places_do_not_lower_how_many_sequences_fit():
    """Of one length: the pool of a window has blocks for whole windows, not for their first tokens."""
    shapes = [PoolShape((None,), 400), PoolShape((128,), 1600)]

    def fit(num_sequences):
        blocks = divide_budget(shapes, 4_000_000, BLOCK, 4000, num_sequences)
        held = [blocks_held(shape.windows, 1000, 1, BLOCK) for shape in shapes]
        return min(min(have // need for have, need in zip(blocks, held)), num_sequences)

    found = [fit(n) for n in (16, 32, 64, 128, 256)]
    assert found[-1] >= 0.7 * max(found) and found[0] == 16
