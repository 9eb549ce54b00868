"""Ranks and the slices that they read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferplane.errors import UsageError
from inferplane.types import WHOLE, Placement, Shard


@given(size=st.integers(1, 16), share=st.integers(1, 50), axis=st.integers(0, 1))
def test_shards_tile_the_dimension(size, share, axis):
    bounds = [Shard(axis, rank, size).bounds(size * share) for rank in range(size)]
    assert [b[0] for b in bounds] == [rank * share for rank in range(size)]
    assert [b[1] for b in bounds] == [(rank + 1) * share for rank in range(size)]
    assert Placement(0, size).part("heads", size * share) == share


@given(ranks=st.integers(1, 6), counts=st.lists(st.integers(1, 9), min_size=1, max_size=4), block=st.integers(1, 3))
def test_sections_tile_the_dimension(ranks, counts, block):
    """Also in a dimension that has an entry for each block of the rows."""
    counts = [count * ranks * block for count in counts]
    total, first, covered = sum(counts), 0, []
    for count in counts:
        for rank in range(ranks):
            shard = Shard(0, rank, ranks, (first, count, total))
            start, stop = shard.bounds(total)
            covered += range(start, stop)
            assert (start / block, stop / block) == shard.bounds(total // block) and not shard.is_whole
        first += count
    assert covered == list(range(total))


def test_sections_that_blocks_do_not_divide():
    with pytest.raises(UsageError, match="3 entries cannot be divided where 12 entries have a section of 6 from 6"):
        Shard(0, 1, 2, (6, 6, 12)).bounds(3)


def test_whole_is_everything():
    assert WHOLE.bounds(7) == (0, 7) and WHOLE.is_whole and not Shard(0, 0, 1, (2, 4, 6)).is_whole
    assert Placement() == Placement(0, 1, 0, 1)


@pytest.mark.parametrize("ranks", [(-1, 1), (1, 1), (4, 4), (0, 0), (0, -2)])
@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_a_rank_outside_its_size(ranks, kind):
    with pytest.raises(UsageError, match=f"{kind}_rank={ranks[0]} of {kind}_size={ranks[1]}"):
        Placement(**{f"{kind}_rank": ranks[0], f"{kind}_size": ranks[1]})


@pytest.mark.parametrize(("count", "size"), [(8, 2), (2, 2), (1, 4), (2, 8)])
def test_kv_heads_follow_their_query_heads(count, size):
    """Rank r has query heads r / size; the KV head of each is on the same rank."""
    heads, rows = 16, 4
    for rank in range(size):
        mine, shard = Placement(rank, size).heads("num_key_value_heads", count)
        first, last = shard.bounds(count * rows)
        assert last - first == mine * rows
        wanted = {q * count // heads for q in range(rank * heads // size, (rank + 1) * heads // size)}
        assert wanted == set(range(first // rows, last // rows))


@pytest.mark.parametrize(("count", "size"), [(3, 2), (2, 3), (6, 4)])
def test_kv_heads_that_cannot_be_shared(count, size):
    with pytest.raises(UsageError, match=rf"num_key_value_heads = {count} cannot be shared equally by {size} ranks"):
        Placement(0, size).heads("num_key_value_heads", count)


def test_experts_are_dealt_out_once():
    assert [e for rank in range(4) for e in Placement.shared(rank, 4).experts("n", 8)] == list(range(8))
    assert Placement(1, 4).experts("n", 6) == range(6)
    with pytest.raises(UsageError, match=r"n_routed_experts = 6 .* 4 ranks"):
        Placement.shared(0, 4).experts("n_routed_experts", 6)


def test_unequal_shares_are_refused_by_name():
    with pytest.raises(UsageError, match=r"num_attention_heads = 10 .* 4 ranks"):
        Placement(1, 4).part("num_attention_heads", 10)
    with pytest.raises(UsageError, match=r"10 entries .* 4 ranks"):
        Shard(0, 1, 4).bounds(10)
