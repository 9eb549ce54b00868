"""Places for sequences that run or wait: as many as the queue is long, over all processes that serve HTTP."""

from __future__ import annotations

import mmap
import os
import tempfile

from inferplane.serving.errors import queue_full

SLOT_BYTES = 8


class Board:
    """What each process has taken, in memory that all of them see. A process writes its own slot alone, so none waits
    for another; two that ask in the same instant may both get the last place.

    Args:
        slots: how many processes.
        fd: of a board that another process has made; None makes one.
    """

    def __init__(self, slots: int, fd: int | None = None) -> None:
        if fd is None:
            fd = _nameless()
            os.ftruncate(fd, slots * SLOT_BYTES)
        self.fd, self.slots = fd, slots
        self._numbers = memoryview(mmap.mmap(fd, slots * SLOT_BYTES)).cast("q")

    def write(self, slot: int, taken: int) -> None:
        """State what a process has taken."""
        self._numbers[slot] = taken

    def others(self, slot: int) -> int:
        """What all other processes have taken."""
        return sum(self._numbers) - self._numbers[slot]


def _nameless() -> int:
    """A file that is gone when the last process is: in memory where the system has that, for disks can be full."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("inferplane-places")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Places:
    """Counts the sequences that run or wait; the answer to one too many is immediate.

    Args:
        most: sequences at a time.
        board: shared with other processes over the same engine; None: there are none.
        slot: this process's on the board.
    """

    def __init__(self, most: int, board: Board | None = None, slot: int = 0) -> None:
        self.most, self._own, self._board, self._slot = most, 0, board, slot
        self._state()

    @property
    def taken(self) -> int:
        """Places that are taken, by all processes."""
        return self._own + (self._board.others(self._slot) if self._board is not None else 0)

    def take(self, count: int) -> None:
        """Take places; ApiError 429 when there are not as many."""
        taken = self.taken
        if taken + count > self.most:
            raise queue_full(f"{taken} sequences are being served or wait, of at most {self.most}")
        self._own += count
        self._state()

    def give_back(self, count: int) -> None:
        """Give places back."""
        self._own -= count
        self._state()

    def _state(self) -> None:
        if self._board is not None:
            self._board.write(self._slot, self._own)


class Reserved:
    """One place, taken for a request before it is known how many sequences it asks for; ApiError 429 if there is none.

    Args:
        places: of which.
    """

    def __init__(self, places: Places) -> None:
        places.take(1)
        self._places, self._held = places, 1

    def hand_over(self) -> int:
        """How many places its taker has from here on: one, or none if it was handed over already."""
        held, self._held = self._held, 0
        return held

    def release(self) -> None:
        """Give the place back if nobody took it over."""
        self._places.give_back(self.hand_over())
