"""What clients send: the memory that it may take, and for JSON what its objects will cost and how many there may be,
before it is parsed.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic_core import from_json

from inferplane.serving.errors import ApiError, invalid

LARGE_BYTES = 64 * 1024
"""A body above this is counted, parsed and checked in a thread; a smaller one takes less time than the way there."""
MAX_CONTAINERS = 2**17
"""Most arrays and objects of a body. The largest request that the formats describe, 2048 messages with their calls and
128 tools with their schemas, has a twentieth."""
MAX_KEYS = 2**16
"""Most keys of a body's objects, for the same reason: each costs as much as five numbers."""
BYTES_PER_MARK = 64
"""Memory for each `,` `[` `{` `:` outside of texts. Measured on bodies of 4 MB (Python 3.11, pydantic 2.14):
`[[[]]]` 55, `{"a":1}` 63, `[]` 33, short texts up to 58, numbers 11 to 46."""
CHEAP_BYTES = 2**20
"""Texts hold marks, too. They are distinguished only where all marks together would cost more than this."""
PIECE_BYTES = 64 * 1024
"""A body is divided at its quotes in such pieces: at once, a million short texts held Python's lock for 60 ms."""
_OPENING, _KEYS = (b"[", b"{"), (b":",)
_MARKS = (*_OPENING, b",", b":")
_collector = threading.Lock()


class BodyMemory:
    """Memory of this process for what clients send and for its values, over all protocols.

    Args:
        max_bytes: most at a time.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = self.freed_bytes = 0

    def hold(self) -> HeldMemory:
        """Return what one request holds of it: nothing yet."""
        return HeldMemory(self)


class HeldMemory:
    """What one request holds of the memory for bodies; leaving the context gives it back.

    Args:
        memory: whose share this is.
    """

    def __init__(self, memory: BodyMemory) -> None:
        self._memory, self._num_bytes = memory, 0

    def add(self, num_bytes: int) -> None:
        """Hold that much more.

        Raises:
            ApiError: 503, all requests together would hold more than there is; nothing changes.
        """
        if self._memory.held_bytes + num_bytes > self._memory.max_bytes:
            raise ApiError(503, "Too many large bodies at a time.", code="busy", retry_after_s=1)
        self._memory.held_bytes += num_bytes
        self._num_bytes += num_bytes

    def release(self, *unused: object) -> None:
        """Give all of it back. It can be a callback of the task that it is for."""
        self._memory.held_bytes -= self._num_bytes
        self._memory.freed_bytes += self._num_bytes
        self._num_bytes = 0

    def __enter__(self) -> HeldMemory:
        return self

    def __exit__(self, *unused: object) -> None:
        self.release()


def object_bytes(body: bytes) -> int:
    """Return the memory in bytes that a body takes at most beside what arrived: a copy, its texts, its values."""
    # One character outside of Latin 1 gives all characters of its text two or four bytes.
    width = 1 if body.isascii() and b"\\u" not in body else 4
    cost = BYTES_PER_MARK * _count(body, _MARKS)
    if cost > CHEAP_BYTES:
        cost = BYTES_PER_MARK * _count(_outside_texts(body), _MARKS)
    return (1 + width) * len(body) + cost


def parse_json(text: bytes | str) -> Any:
    """Return JSON as Python values.

    Raises:
        ValueError: it is not JSON, which NaN, infinities, invalid UTF-8, lone surrogates and too deep nesting are not.
        ApiError: 400, it has more than `MAX_CONTAINERS` arrays and objects, or more than `MAX_KEYS` keys.
    """
    if len(text) <= LARGE_BYTES:
        return from_json(text, allow_inf_nan=False)
    raw = text.encode() if isinstance(text, str) else text
    for marks, most, name in ((_OPENING, MAX_CONTAINERS, "arrays and objects"), (_KEYS, MAX_KEYS, "keys")):
        if _count(raw, marks) > most and (found := _count(_outside_texts(raw), marks)) > most:
            raise invalid(f"{found} {name}; at most {most} in a request.", None, "too_many")
    with _collector_paused():
        return from_json(raw, allow_inf_nan=False)


def _count(data: bytes, marks: tuple[bytes, ...]) -> int:
    return sum(data.count(mark) for mark in marks)  # other threads may run between two marks


def _outside_texts(body: bytes) -> bytes:
    """Return JSON without its texts. Behind the first error of a text that is no JSON, the rest may be anything: the
    parser does not come there.
    """
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside, is_inside = [], False
    for start in range(0, len(body), PIECE_BYTES):
        parts = body[start : start + PIECE_BYTES].split(b'"')
        outside.append(b"".join(parts[is_inside::2]))
        is_inside ^= len(parts) % 2 == 0
    return b"".join(outside)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from walking through values while they grow: that was four fifths of parsing."""
    with _collector:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
