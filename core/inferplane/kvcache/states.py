"""Gives sequences the slots in which recurrent layers keep their states, and finds states of known prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from inferplane.errors import UsageError
from inferplane.kvcache.allocator import BlockAllocator
from inferplane.types import KVCache
from inferplane.types.state import PADDING_SLOT, StateSlots

SLOTS_PER_SEQUENCE = 2


class StatePool:
    """The slots of all sequences, in integers only: two for each sequence.

    A slot may hold the states behind a known prefix. A sequence that begins with this prefix reads them there, and
    writes elsewhere. While no sequence reads such a slot it is cached, until a sequence needs one to write; the least
    recently read goes first. Nothing is copied.

    Args:
        sequences: largest number of sequences that have slots at a time.

    Raises:
        UsageError: it is less than 1.
    """

    def __init__(self, sequences: int) -> None:
        if sequences < 1:
            raise UsageError(f"States of {sequences} sequences.", remedy="use at least 1")
        self.total = sequences
        self._slots = BlockAllocator(SLOTS_PER_SEQUENCE * sequences)  # number 0 is the slot after that of padding
        self._running = 0

    @classmethod
    def of(cls, cache: KVCache) -> StatePool | None:
        """The pool for as many sequences as a cache has states of; None if none of its layers keeps any."""
        states = cache.list_states()
        return cls((states[0].slots - 1) // SLOTS_PER_SEQUENCE) if states else None

    @property
    def slots(self) -> int:
        """Number of slots that a `StateCache` has to have, that of padding included."""
        return _FIRST + SLOTS_PER_SEQUENCE * self.total

    @property
    def available(self) -> int:
        """Number of sequences that can get slots."""
        return self.total - self._running

    def allocate(self, prefix: bytes | None = None) -> StateSlots | None:
        """The slots of a new sequence; None if there are none.

        Args:
            prefix: the content, known here, whose states the sequence's first step reads; None: it reads none.
        """
        if not self.available:
            return None
        self._running += 1
        (read,) = self._slots.allocate(1) if prefix is None else self._slots.acquire([prefix])
        (write,) = self._slots.allocate(1)
        return StateSlots(_FIRST + read, _FIRST + write)

    def advance(self, slots: StateSlots, prefix: bytes | None = None) -> StateSlots:
        """The slots of a sequence's next step, which reads what the last one wrote.

        Args:
            slots: of the last step.
            prefix: the content whose states the last step wrote, to be found from now on; None: they stay unknown.
        """
        read, write = (slot - _FIRST for slot in slots)
        if prefix is not None:
            self._slots.publish(write, prefix)
        self._slots.release([read])
        return StateSlots(slots.write, _FIRST + self._slots.allocate(1)[0])

    def release(self, slots: StateSlots) -> None:
        """Take back the slots of a sequence. States of known prefixes can still be found.

        Raises:
            UsageError: no sequence has them.
        """
        numbers = [slot - _FIRST for slot in slots]
        if not all(map(self._slots.users, numbers)):
            raise UsageError(f"State slots {tuple(slots)} are released, but no sequence has them.")
        self._slots.release(numbers)
        self._running -= 1

    def count_prefix(self, contents: Sequence[bytes]) -> int:
        """The length of the longest prefix of these contents whose states are known; 0: of none.

        Args:
            contents: hashes of a sequence's full blocks, in order.
        """
        return next((n for n in range(len(contents), 0, -1) if self._slots.knows(contents[n - 1])), 0)

    def users(self, slot: int) -> int:
        """Number of sequences that have a slot."""
        return self._slots.users(slot - _FIRST)

    def check(self) -> None:
        """Raise AssertionError if the records contradict each other. For tests and debugging."""
        self._slots.check()
        assert self._slots.used <= SLOTS_PER_SEQUENCE * self._running <= SLOTS_PER_SEQUENCE * self.total


_FIRST = PADDING_SLOT + 1
