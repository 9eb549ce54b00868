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


def test_whole_is_everything():
    assert WHOLE.bounds(7) == (0, 7)
    assert Placement() == Placement(0, 1, 0, 1)


@pytest.mark.parametrize("ranks", [(-1, 1), (1, 1), (4, 4), (0, 0), (0, -2)])
@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_a_rank_outside_its_size(ranks, kind):
    with pytest.raises(UsageError, match=f"{kind}_rank={ranks[0]} of {kind}_size={ranks[1]}"):
        Placement(**{f"{kind}_rank": ranks[0], f"{kind}_size": ranks[1]})


def test_unequal_shares_are_refused_by_name():
    with pytest.raises(UsageError, match=r"num_attention_heads = 10 .* 4 ranks"):
        Placement(1, 4).part("num_attention_heads", 10)
    with pytest.raises(UsageError, match=r"10 entries .* 4 ranks"):
        Shard(0, 1, 4).bounds(10)
