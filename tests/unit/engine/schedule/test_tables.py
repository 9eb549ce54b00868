"""Block tables of a sequence: what a prefix hit needs in each of them, and that all take and give back together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.state import Request
from inferplane.engine.schedule.tables import SequenceTables
from inferplane.kvcache import BlockAllocator, block_hashes, root_hash

BLOCK = 4
WINDOWS = [(None,), (6,), (None, 6), (None, None, 1), (9, 5), (None, 13, 4)]


def request(tokens, max_tokens=20):
    return Request(0, [t % 5 for t in range(tokens)], SamplingParams(max_tokens=max_tokens))


def hashes_of(r):
    return block_hashes(root_hash("test"), r.prompt, BLOCK)


def first_needed(count, window):
    """The first of `count` reused blocks that a window before the next token reaches."""
    return 0 if window is None else max(0, count * BLOCK + 1 - window) // BLOCK


@given(windows=st.sampled_from(WINDOWS), tokens=st.integers(1, 40), data=st.data())
def test_a_hit_is_the_longest_for_which_every_table_has_what_it_needs(windows, tokens, data):
    tables = SequenceTables(BlockAllocator(200), BLOCK, windows)
    writer, reader = request(tokens), request(tokens + 1)
    hashes = writer.hashes = hashes_of(writer)
    assert tables.admit(writer, (), tokens)
    known = data.draw(st.lists(st.lists(st.booleans(), min_size=10, max_size=10), min_size=3, max_size=3))
    for number, table in enumerate(writer.tables):
        for i, block_hash in enumerate(hashes):
            if known[number][i]:
                tables.allocator.publish(table.blocks[i], content(block_hash, number))
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
    tables.allocator.check()
    assert tables.allocator.used == 0


def content(block_hash, table):
    """What the block of a table is known by."""
    return block_hash + table.to_bytes(4, "little") if table else block_hash


@given(windows=st.sampled_from(WINDOWS), blocks=st.integers(1, 12), tokens=st.integers(1, 20), more=st.integers(0, 20))
def test_all_tables_get_their_blocks_or_none(windows, blocks, tokens, more):
    tables, r = SequenceTables(BlockAllocator(blocks), BLOCK, windows), request(tokens)
    need = sum(-(-(tokens if w is None else min(tokens, 8)) // BLOCK) for w in windows)
    assert tables.admit(r, (), 8) == (need <= blocks)
    assert tables.allocator.used == (need if need <= blocks else 0) == sum(len(t.blocks) for t in r.tables)
    if r.tables:
        held, wanted = tables.allocator.used, -(-(tokens + more) // BLOCK)
        grown = sum(max(wanted, len(t.blocks)) for t in r.tables)
        assert tables.extend(r, tokens + more) == (grown <= blocks)
        assert tables.allocator.used == (grown if grown <= blocks else held)
        if grown <= blocks:
            assert tables.release_beyond(r, tokens) == grown - len(windows) * -(-tokens // BLOCK)
        tables.release_all(r)
    assert tables.allocator.used == 0 and not r.tables


def test_blocks_that_a_window_has_passed_are_given_back():
    tables, r = SequenceTables(BlockAllocator(20), BLOCK, (None, 6, 1)), request(16)
    assert tables.admit(r, (), 16)
    whole = [list(t.blocks) for t in r.tables]
    for computed, released in ((5, (0, 0, 1)), (9, (0, 1, 2)), (12, (0, 1, 3)), (16, (0, 2, 4))):
        r.computed = computed
        tables.release_out_of_window(r)
        assert tuple(t.released for t in r.tables) == released
        assert [t.blocks for t in r.tables] == [[0] * n + all_[n:] for n, all_ in zip(released, whole)]
        assert tables.allocator.used == 12 - sum(released)


@given(windows=st.sampled_from(WINDOWS), blocks=st.integers(3, 20), tokens=st.integers(1, 40), limit=st.integers(1, 30))
def test_the_largest_step_is_the_largest_that_fits(windows, blocks, tokens, limit):
    tables = SequenceTables(BlockAllocator(blocks), BLOCK, windows)
    step = tables.max_step_tokens(tokens, limit)
    fits = [n for n in range(1, limit + 1) if tables.max_blocks(tokens, n) <= blocks]
    assert step == (max(fits) if fits else limit)
