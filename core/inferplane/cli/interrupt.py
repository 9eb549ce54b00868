"""Ctrl-C as a request to stop at the next safe place."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While it lasts, Ctrl-C only sets `seen`, except where `at_once` or `at_second` let it raise KeyboardInterrupt.

    An exception in the middle of a step could leave a scheduler and its blocks at odds, and one that comes while the
    last is being dealt with would end a program that is to go on.

    Args:
        patient: False leaves Ctrl-C as it is.
    """

    def __init__(self, *, patient: bool = True) -> None:
        self.seen, self._patient = False, patient
        self._raise, self._raise_next = False, False
        self._usual: Any = None

    def __enter__(self) -> Interrupt:
        if self._patient:
            self._usual = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._patient:
            signal.signal(signal.SIGINT, self._usual)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, Ctrl-C raises: for waiting."""
        self._raise = True
        try:
            yield
        finally:
            self._raise = False

    @contextmanager
    def at_second(self) -> Iterator[None]:
        """Inside, the first Ctrl-C sets `seen` and the second raises: for work that looks at `seen` now and then."""
        self.seen, self._raise_next = False, True
        try:
            yield
        finally:
            self._raise, self._raise_next = False, False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._raise:
            self._raise = False
            raise KeyboardInterrupt
        self.seen, self._raise = True, self._raise_next
