"""A file read at positions into memory, large pieces by a few threads at once.

One thread that fills fresh memory waits for its pages too, and meanwhile asks the disk for nothing (decision 0028).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inferplane.errors import CheckpointError
from inferplane.files import AGAIN
from inferplane.models.jsontext import reading

THREADS = 4
"""More than the fewest cores: some of them wait for the disk."""
PIECE_BYTES = 4 * 2**20
"""What a thread takes at a time, in order, so that the disk is still read from front to back."""


class FileReader:
    """One open file.

    Args:
        path: a regular file.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - `close` closes it
        self._threads: ThreadPoolExecutor | None = None

    def read(self, start: int, memory: memoryview) -> None:
        """Fill memory, bytes, with what the file holds from position `start` on.

        Raises:
            CheckpointError: the file ends before, or the system refuses. What the memory holds then is not told.
        """
        pieces = range(0, len(memory), PIECE_BYTES)
        if len(pieces) <= 1:
            self._fill(start, memory)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="inferplane-read")
        running = []
        try:
            for at in pieces:
                running.append(self._threads.submit(self._fill, start + at, memory[at : at + PIECE_BYTES]))
            for piece in running:
                piece.result()
        except BaseException:  # nobody writes there any more when this raises
            threads, self._threads = self._threads, None
            threads.shutdown(cancel_futures=True)
            raise

    def _fill(self, start: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            with reading(self.path):
                got = os.preadv(self._file.fileno(), [memory[done:]], start + done)
            if not got:
                raise CheckpointError(f"{self.path} ends before its tensors do.", remedy=AGAIN)
            done += got

    def close(self) -> None:
        """Close the file and end the threads; nothing happens the second time."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._file.close()
