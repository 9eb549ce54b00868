"""Block tables of a sequence: what a prefix hit needs in each of them, and that all take and give back together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.state import Request
from inferplane.engine.schedule.tables import SequenceTables
from inferplane.kvcache import BlockAllocator, BlockPools, block_hashes, root_hash

BLOCK = 4
WINDOWS = [(None,), (6,), (None, 6), (None, None, 1), (9, 5), (None, 13, 4)]


def request(tokens, max_tokens=20):
    return Request(0, [t % 5 for t in range(tokens)], SamplingParams(max_tokens=max_tokens))


def hashes_of(r):
    return block_hashes(root_hash("test"), r.prompt, BLOCK)


def first_needed(count, window):
    """The first of `count` reused blocks that a window before the next token reaches."""
    return 0 if window is None else max(0, count * BLOCK + 1 - window) // BLOCK


POOLS = [(), (0, 1, 1), (0, 0, 1)]


def pools(numbers, *totals):
    """Allocators of so many blocks, as many as there are numbers of pools."""
    return BlockPools([BlockAllocator(n) for n in totals[: 1 + max(numbers, default=0)]], numbers)


@given(windows=st.sampled_from(WINDOWS), numbers=st.sampled_from(POOLS), tokens=st.integers(1, 40), data=st.data())
def test_a_hit_is_the_longest_for_which_every_table_has_what_it_needs(windows, numbers, tokens, data):
    tables = SequenceTables(pools(numbers[: len(windows)], 200, 150), BLOCK, windows)
    writer, reader = request(tokens), request(tokens + 1)
    hashes = writer.hashes = hashes_of(writer)
    assert tables.admit(writer, (), tokens)
    known = data.draw(st.lists(st.lists(st.booleans(), min_size=10, max_size=10), min_size=3, max_size=3))
    for number, table in enumerate(writer.tables):
        for i, block_hash in enumerate(hashes):
            if known[number][i]:
                tables.allocators[number].publish(table.blocks[i], content(block_hash, number))
    want = max(
        count
        for count in range(len(hashes) + 1)
        if all(known[t][i] for t, w in enumerate(windows) for i in range(first_needed(count, w), count))
    )
    assert tables.admit(reader, hashes, 8) and reader.computed == want * BLOCK
    for number, (table, window) in enumerate(zip(reader.tables, windows)):
        first = first_needed(want, window)
        assert table.released == first and table.blocks[:want] == [
            *[0] * first,
            *writer.tables[number].blocks[first:want],
        ]
        stop = tokens + 1 if window is None else min(tokens + 1, reader.computed + 8)
        assert len(table.blocks) == -(-stop // BLOCK)
    tables.release_all(reader)
    tables.release_all(writer)
    tables.pools.check()
    assert tables.pools.used == 0


def content(block_hash, table):
    """What the block of a table is known by."""
    return block_hash + table.to_bytes(4, "little") if table else block_hash


@given(windows=st.sampled_from(WINDOWS), blocks=st.integers(1, 12), tokens=st.integers(1, 20), more=st.integers(0, 20))
def test_all_tables_get_their_blocks_or_none(windows, blocks, tokens, more):
    tables, r = SequenceTables(BlockPools([BlockAllocator(blocks)]), BLOCK, windows), request(tokens)
    need = sum(-(-(tokens if w is None else min(tokens, 8)) // BLOCK) for w in windows)
    assert tables.admit(r, (), 8) == (need <= blocks)
    assert tables.pools.used == (need if need <= blocks else 0) == sum(len(t.blocks) for t in r.tables)
    if r.tables:
        held, wanted = tables.pools.used, -(-(tokens + more) // BLOCK)
        grown = sum(max(wanted, len(t.blocks)) for t in r.tables)
        assert tables.extend(r, tokens + more) == (grown <= blocks)
        assert tables.pools.used == (grown if grown <= blocks else held)
        if grown <= blocks:
            assert tables.release_beyond(r, tokens) == grown - len(windows) * -(-tokens // BLOCK)
        tables.release_all(r)
    assert tables.pools.used == 0 and not r.tables


@given(
    blocks=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    tokens=st.integers(1, 20),
    more=st.integers(0, 20),
    numbers=st.sampled_from(POOLS[1:]),
)
def test_all_pools_have_the_blocks_or_none_is_taken(blocks, tokens, more, numbers):
    windows = (None, 6, 3)
    tables, r = SequenceTables(pools(numbers, *blocks), BLOCK, windows), request(tokens)

    def needed(lengths):
        return [sum(n for n, own in zip(lengths, numbers) if own == pool) for pool in range(2)]

    def used():
        return [pool.used for pool in tables.pools.pools]

    first = [-(-(tokens if w is None else min(tokens, 8)) // BLOCK) for w in windows]
    fits = all(need <= have for need, have in zip(needed(first), blocks))
    assert tables.admit(r, (), 8) == fits and used() == (needed(first) if fits else [0, 0])
    if fits:
        grown = needed([max(-(-(tokens + more) // BLOCK), n) for n in first])
        fits = all(need <= have for need, have in zip(grown, blocks))
        assert tables.extend_all([(r, tokens + more)]) == fits and used() == (grown if fits else needed(first))
        tables.held = []
        tables.release_all(r)
        assert used() == (grown if fits else needed(first)), "a step in flight may use them"
        for allocator, given_back in tables.held:
            allocator.release(given_back)
    assert used() == [0, 0]


def test_the_pool_that_is_too_small_is_found():
    tables = SequenceTables(pools((0, 1, 1), 10, 5), BLOCK, (None, 6, 3))
    assert tables.find_shortage(40, 1) is None, "two blocks and three"
    assert tables.find_shortage(41, 1) == (11, 10)
    assert tables.find_shortage(40, 9) == (9, 5)


def test_blocks_that_a_window_has_passed_are_given_back():
    tables, r = SequenceTables(BlockPools([BlockAllocator(20)]), BLOCK, (None, 6, 1)), request(16)
    assert tables.admit(r, (), 16)
    whole = [list(t.blocks) for t in r.tables]
    for computed, released in ((5, (0, 0, 1)), (9, (0, 1, 2)), (12, (0, 1, 3)), (16, (0, 2, 4))):
        r.computed = computed
        tables.release_out_of_window(r)
        assert tuple(t.released for t in r.tables) == released
        assert [t.blocks for t in r.tables] == [[0] * n + all_[n:] for n, all_ in zip(released, whole)]
        assert tables.pools.used == 12 - sum(released)


@given(windows=st.sampled_from(WINDOWS), blocks=st.integers(3, 20), tokens=st.integers(1, 40), limit=st.integers(1, 30))
def test_the_largest_step_is_the_largest_that_fits(windows, blocks, tokens, limit):
    tables = SequenceTables(BlockPools([BlockAllocator(blocks)]), BLOCK, windows)
    step = tables.max_step_tokens(tokens, limit)
    fits = [n for n in range(1, limit + 1) if not tables.find_shortage(tokens, n)]
    assert step == (max(fits) if fits else limit)
