"""Reads parts of a file into memory; several threads share a large part.

A single thread that fills fresh memory also waits for the memory's pages, and meanwhile the disk is idle (decision
0028).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inferplane.errors import CheckpointError
from inferplane.files import AGAIN
from inferplane.models.reading.json_scanner import reporting_read_errors

THREADS = 4
"""More threads than a small machine has cores, because some of them wait for the disk."""
PIECE_BYTES = 4 * 2**20
"""Bytes that a thread reads at a time. Pieces are taken in order, so the disk is still read from front to back."""


class FileReader:
    """One open file.

    Args:
        path: a regular file.

    Raises:
        CheckpointError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reporting_read_errors(path):
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - `close` closes it
        self._threads: ThreadPoolExecutor | None = None

    def read(self, start: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes of the file from position `start` on.

        Raises:
            CheckpointError: the file ends too early or cannot be read. The content of `memory` is then undefined.
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
        except BaseException:  # no thread may write to `memory` after this has raised
            threads, self._threads = self._threads, None
            threads.shutdown(cancel_futures=True)
            raise

    def _fill(self, start: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            with reporting_read_errors(self.path):
                got = os.preadv(self._file.fileno(), [memory[done:]], start + done)
            if not got:
                raise CheckpointError(f"{self.path} ends before its tensors do.", remedy=AGAIN)
            done += got

    def close(self) -> None:
        """Close the file and end the threads. A second call does nothing."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._file.close()
