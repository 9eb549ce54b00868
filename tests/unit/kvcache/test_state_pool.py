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
    exchanged = StateSlots(slots.write, slots.read)
    pool.release(exchanged)
    with pytest.raises(UsageError, match="no sequence has them"):
        pool.release(slots)
    again = pool.allocate()
    assert again is not None and set(again) == set(slots) and pool.available == 0


def test_a_pool_for_no_sequence_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        StatePool(0)
