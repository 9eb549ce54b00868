"""State slots: every sequence has two of its own, none is the slot of padding, and none is lost."""

from __future__ import annotations

import pytest

from inferplane.errors import UsageError
from inferplane.kvcache import StatePool
from inferplane.types import StateSlots
from inferplane.types.state import PADDING_SLOT


def test_each_sequence_has_two_slots_until_there_are_none():
    pool = StatePool(3)
    given = [pool.allocate() for _ in range(3)]
    slots = [slot for pair in given if pair is not None for slot in pair]
    assert sorted(slots) == [1, 2, 3, 4, 5, 6] and PADDING_SLOT not in slots
    assert max(slots) < pool.slots == 7
    assert pool.available == 0 and pool.allocate() is None


def test_released_slots_are_given_again_once():
    pool = StatePool(1)
    slots = pool.allocate()
    assert slots is not None
    later = pool.advance(slots)
    assert later == StateSlots(slots.write, slots.read), "what was read is written next"
    pool.release(later)
    with pytest.raises(UsageError, match="no sequence has them"):
        pool.release(slots)
    again = pool.allocate()
    assert again is not None and set(again) == set(slots) and pool.available == 0


def test_states_of_a_prefix_are_found_read_by_several_and_never_written():
    pool = StatePool(3)
    a = pool.advance(pool.allocate(), b"one")
    assert pool.count_prefix([b"one", b"two"]) == 1 and pool.count_prefix([b"two"]) == 0
    b, c = pool.allocate(b"one"), pool.allocate(b"one")
    assert a.read == b.read == c.read and pool.users(a.read) == 3 and len({a.write, b.write, c.write, a.read}) == 4
    for slots in (a, b, c):
        after = pool.advance(slots)
        assert a.read not in after
        pool.check()
        pool.release(after)
    assert pool.users(a.read) == 0 and pool.count_prefix([b"one"]) == 1
    pool.check()


def test_the_states_that_were_read_last_stay_longest():
    pool = StatePool(2)
    for prefix in (b"one", b"two"):
        pool.release(pool.advance(pool.allocate(), prefix))
    pool.release(pool.allocate(b"one"))
    assert pool.count_prefix([b"one"]) == pool.count_prefix([b"two"]) == 1
    given = [pool.allocate()]  # two slots are free
    assert pool.count_prefix([b"one"]) == pool.count_prefix([b"two"]) == 1
    given.append(pool.allocate(b"one"))  # and writes where the other prefix was
    assert pool.count_prefix([b"one"]) == 1 and pool.count_prefix([b"two"]) == 0
    for slots in given:
        pool.release(slots)
    pool.check()
    assert pool.available == 2


def test_states_of_equal_prefixes_are_known_once():
    pool = StatePool(2)
    first, second = pool.allocate(), pool.allocate()
    first, second = pool.advance(first, b"one"), pool.advance(second, b"one")
    pool.release(second)
    assert pool.allocate(b"one").read == first.read
    pool.check()


def test_a_pool_for_no_sequence_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        StatePool(0)
