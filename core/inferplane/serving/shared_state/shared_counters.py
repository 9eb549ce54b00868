"""Counters in memory that all processes of one server share."""

from __future__ import annotations

import mmap
import os
import tempfile

CELL_BYTES = 8


class SharedCounters:
    """A table of 64-bit integers in shared memory, with one row per process.

    A process writes only its own row, so no process waits for another. The price: two processes that read a sum in the
    same instant and act on it can both take the last free slot.

    Args:
        processes: number of rows.
        cells: integers per row.
        fd: file descriptor of a table that another process created. None creates a table; other processes can open it
            only if it has several rows.
    """

    def __init__(self, processes: int, cells: int, fd: int | None = None) -> None:
        size = processes * cells * CELL_BYTES
        if fd is None and processes > 1:
            fd = _create_anonymous_file()
            os.ftruncate(fd, size)
        self.fd, self.processes, self._cells = fd, processes, cells
        self._numbers = memoryview(bytearray(size) if fd is None else mmap.mmap(fd, size)).cast("q")

    def write(self, process: int, cell: int, number: int) -> None:
        """Set a counter of one process."""
        self._numbers[process * self._cells + cell] = number

    def read(self, process: int, cell: int) -> int:
        """Return a counter of one process."""
        return int(self._numbers[process * self._cells + cell])

    def sum(self, cell: int) -> int:
        """Return the sum of a counter over all processes."""
        return sum(self._numbers[cell :: self._cells])


def _create_anonymous_file() -> int:
    """Create a file that vanishes with the last process that has it open.

    It is in memory where the system supports that, because a disk can be full.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("inferplane-counters")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
