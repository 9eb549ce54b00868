"""Places for sequences that run or wait: as many as the queue is long, over all processes that serve HTTP; and the
board on which these processes state their numbers."""

from __future__ import annotations

import mmap
import os
import tempfile

from inferplane.serving.errors import queue_full

CELL_BYTES = 8
SLOTS_CELL = 0
"""The cell of a slot in which the places stand that its process has taken."""


class SharedCounters:
    """Numbers of each process, in memory that all of them see. A process writes its own slot alone, so none waits for
    another; two that ask for places in the same instant may both get the last one.

    Args:
        slots: how many processes.
        cells: numbers of each.
        fd: of a board that another process has made; None makes one, which others can see if it has several slots.
    """

    def __init__(self, slots: int, cells: int, fd: int | None = None) -> None:
        size = slots * cells * CELL_BYTES
        if fd is None and slots > 1:
            fd = _nameless()
            os.ftruncate(fd, size)
        self.fd, self.slots, self._cells = fd, slots, cells
        self._numbers = memoryview(bytearray(size) if fd is None else mmap.mmap(fd, size)).cast("q")

    def write(self, slot: int, cell: int, number: int) -> None:
        """State a number of a process."""
        self._numbers[slot * self._cells + cell] = number

    def read(self, slot: int, cell: int) -> int:
        """A number of a process."""
        return int(self._numbers[slot * self._cells + cell])

    def sum(self, cell: int) -> int:
        """A number of all processes together."""
        return sum(self._numbers[cell :: self._cells])


def _nameless() -> int:
    """A file that is gone when the last process is: in memory where the system has that, for disks can be full."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("inferplane-board")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SequenceSlots:
    """Counts the sequences that run or wait; the answer to one too many is immediate.

    Args:
        most: sequences at a time.
        board: shared with other processes over the same engine; None: there are none.
        slot: this process's on the board.
    """

    def __init__(self, most: int, board: SharedCounters | None = None, slot: int = 0) -> None:
        self.most, self._own, self._board, self._slot = most, 0, board, slot
        self._state()

    @property
    def taken(self) -> int:
        """Places that are taken, by all processes."""
        return self._own if self._board is None else self._board.sum(SLOTS_CELL)

    def take(self, count: int) -> None:
        """Take places; ApiError 429 when there are not as many."""
        taken = self.taken
        if taken + count > self.most:
            raise queue_full(f"{taken} sequences are being served or wait, of at most {self.most}")
        self._own += count
        self._state()

    def release(self, count: int) -> None:
        """Give places back."""
        self._own -= count
        self._state()

    def _state(self) -> None:
        if self._board is not None:
            self._board.write(self._slot, SLOTS_CELL, self._own)


class SlotReservation:
    """One place, taken for a request before it is known how many sequences it asks for; ApiError 429 if there is none.

    Args:
        places: of which.
    """

    def __init__(self, slots: SequenceSlots) -> None:
        slots.take(1)
        self._places, self._held = slots, 1

    def transfer(self) -> int:
        """How many places its taker has from here on: one, or none if it was handed over already."""
        held, self._held = self._held, 0
        return held

    def release(self) -> None:
        """Give the place back if nobody took it over."""
        self._places.release(self.transfer())
