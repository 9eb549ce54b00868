"""Lets a process of its own parse and check large bodies, with limits of time and memory.

C code that parses 4 MB of JSON keeps Python's lock for 30 to 60 ms, and freeing its values takes as long again: in a
thread of the process that serves, it would stop every stream. So a body above `LARGE_BYTES` goes to a confined process
(`inferplane.confined`), through memory that both share. Its answer is an error, or that the body is valid; the process
that serves parses valid bodies alone, without the values of fields that have no effect.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inferplane.confined import ConfinedProcess
from inferplane.serving.errors import ApiError

CHECK_S = 10.0
"""Most seconds for a body; 4 MB take a fifth of a second, and a loaded machine ten times as long."""
START_S = 30.0
"""Most seconds for the start of the process."""
BASE_MEMORY_BYTES, MEMORY_PER_BYTE = 2**29, 100
"""Most address space of the process, and as much again for each byte that a body may have: a byte costs at most 64 as a
value (`bodies.BYTES_PER_MARK`), and up to 10 as a text with copies of it."""
SCRIPT = Path(__file__).parents[1] / "http" / "check_process.py"
"""What the process runs: it knows every format, which this package does not."""


class CheckedBody(NamedTuple):
    """A valid body.

    Args:
        body: as it arrived, or with null for the values of fields that have no effect.
        value_bytes: memory in bytes that parsing it takes at most.
    """

    body: bytes
    value_bytes: int


class InvalidBody(Exception):
    """A body is refused, where the answer's form depends on the body.

    Args:
        error: why.
        fields: what of the body the answer repeats.
    """

    def __init__(self, error: ApiError, fields: Mapping[str, Any]) -> None:
        super().__init__(error.message)
        self.error, self.fields = error, fields


class LargeBodyReader:
    """Checks bodies one after the other. Its process starts at the first use, and again after it has ended.

    Args:
        max_body_bytes: the largest body.
        check_s: most seconds for a body.
    """

    def __init__(self, max_body_bytes: int, check_s: float = CHECK_S) -> None:
        self._memory_bytes = BASE_MEMORY_BYTES + MEMORY_PER_BYTE * max_body_bytes
        self._check_s = check_s
        self._process: ConfinedProcess | None = None
        self._lock = threading.Lock()
        self._file: int | None = None
        self._is_closed = False

    @property
    def process(self) -> ConfinedProcess | None:
        """The process, while it runs."""
        return self._process if self._process is not None and self._process.alive else None

    def check(self, path: str, body: bytes, limits: Sequence[int | None]) -> CheckedBody:
        """Parse a body and check its fields.

        Args:
            path: the route, which decides about the format.
            body: JSON.
            limits: `PromptLimits`.

        Raises:
            ApiError: 400, it is invalid; 503, the process took too long or ended.
            InvalidBody: it is invalid; see there.
        """
        with self._lock:
            seconds = START_S
            try:
                process = self._running_process()
                seconds = self._check_s
                assert self._file is not None
                _write(self._file, body)
                answer = process.ask({"path": path, "size": len(body), "limits": limits}, seconds)
                if answer.get("size") is not None:
                    body = _read(self._file, answer["size"])
            except TimeoutError:
                raise _make_failure(f"takes longer than {seconds:g} s") from None
            except EOFError:
                raise _make_failure("is not done: the process that does it ended") from None
            finally:
                if self._file is not None:
                    os.ftruncate(self._file, 0)
        if "error" in answer:
            status, message, param, code = answer["error"]
            error = ApiError(status, message, param=param, code=code)
            if answer["fields"] is None:
                raise error
            raise InvalidBody(error, answer["fields"])
        return CheckedBody(body, answer["value_bytes"])

    def close(self) -> None:
        """Kill the process, also while it checks a body, and start none again."""
        self._is_closed = True
        if self._process is not None:
            self._process.close()
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _running_process(self) -> ConfinedProcess:
        """Return the process, which is started if none runs.

        Raises:
            TimeoutError: it does not start in time.
            EOFError: it ends instead, or this is closed.
        """
        if self._is_closed:
            raise EOFError
        if self._file is None:
            self._file = _make_shared_file()
        if self.process is None:
            setup = {"path": sys.path, "file": self._file}
            self._process = ConfinedProcess(SCRIPT, setup, START_S, self._memory_bytes, (self._file,))
        assert self._process is not None
        if self._is_closed:  # meanwhile
            self._process.close()
        return self._process


def _make_shared_file() -> int:
    """Return a file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("inferplane-body")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(file: int, data: bytes) -> None:
    left, at = memoryview(data), 0
    while left:  # the system may take less at a time; Python's lock is free meanwhile
        written = os.pwrite(file, left, at)
        left, at = left[written:], at + written


def _read(file: int, size: int) -> bytes:
    pieces, at = [], 0
    while at < size and (piece := os.pread(file, size - at, at)):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def _make_failure(why: str) -> ApiError:
    return ApiError(503, f"Reading this large body {why}.", code="reader_failed", retry_after_s=1)
