"""Gives sequences the slots in which recurrent layers keep their states."""

from __future__ import annotations

from inferplane.errors import UsageError
from inferplane.types import KVCache
from inferplane.types.state import PADDING_SLOT, StateSlots

SLOTS_PER_SEQUENCE = 2


class StatePool:
    """The free slots of all sequences, in integers only: two for each sequence.

    Args:
        sequences: largest number of sequences that have slots at a time.

    Raises:
        UsageError: it is less than 1.
    """

    def __init__(self, sequences: int) -> None:
        if sequences < 1:
            raise UsageError(f"States of {sequences} sequences.", remedy="use at least 1")
        first = PADDING_SLOT + 1
        self.total = sequences
        self._free = [StateSlots(first + 2 * i, first + 2 * i + 1) for i in reversed(range(sequences))]
        self._used: set[int] = set()

    @classmethod
    def of(cls, cache: KVCache) -> StatePool | None:
        """The pool for as many sequences as a cache has states of; None if none of its layers keeps any."""
        states = cache.list_states()
        return cls((states[0].slots - 1) // SLOTS_PER_SEQUENCE) if states else None

    @property
    def slots(self) -> int:
        """Number of slots that a `StateCache` has to have, that of padding included."""
        return PADDING_SLOT + 1 + SLOTS_PER_SEQUENCE * self.total

    @property
    def available(self) -> int:
        """Number of sequences that can get slots."""
        return len(self._free)

    def allocate(self) -> StateSlots | None:
        """The slots of a new sequence; None if there are none. They hold states of earlier owners."""
        if not self._free:
            return None
        slots = self._free.pop()
        self._used.add(min(slots))
        return slots

    def release(self, slots: StateSlots) -> None:
        """Take back the slots of a sequence, exchanged or not.

        Raises:
            UsageError: no sequence has them.
        """
        if min(slots) not in self._used:
            raise UsageError(f"State slots {tuple(slots)} are released, but no sequence has them.")
        self._used.remove(min(slots))
        self._free.append(slots)
