"""Turns Ctrl-C and SIGTERM into exceptions, or into a flag that is checked at the next safe point."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes, as a shell reports them for programs that the signals end."""
SHOW_CURSOR = b"\x1b[?25h"


class Terminated(BaseException):
    """Raised on SIGTERM, so that files are closed and child processes are ended."""


def run_with_signals(main: Callable[[], int]) -> int:
    """Run `main` with signals as exceptions and return its exit code; afterwards signals end the process at once.

    Signals that the parent process ignores stay ignored. A launcher of several ranks handles SIGTERM itself: a rank
    that waits in a collective cannot react, and is killed.
    """
    ours = [signal.SIGINT] if "WORLD_SIZE" in os.environ else [signal.SIGINT, signal.SIGTERM]
    numbers = [n for n in ours if signal.getsignal(n) is signal.SIG_DFL]
    try:
        try:
            for number in numbers:
                signal.signal(number, raise_for_signal)
            return main()
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Terminated:
        return TERMINATED


def raise_for_signal(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT and SIGTERM: raise KeyboardInterrupt or Terminated, or end the process during an import."""
    if _importing(frame):
        # Extension modules lose an exception during their import, or abort. Only the cursor, which a progress bar
        # hides, has to be restored.
        if sys.stderr is not None and sys.stderr.isatty():
            os.write(sys.stderr.fileno(), SHOW_CURSOR)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _importing(frame: FrameType | None) -> bool:
    """Whether a frame runs inside the import of a module."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class Interrupt:
    """A context in which Ctrl-C only sets `seen`, except that `at_once` and `at_second` let it raise KeyboardInterrupt.

    An exception in the middle of a step could leave the scheduler and its blocks inconsistent, and one during the
    handling of another would end a program that should continue.

    Args:
        patient: False leaves Ctrl-C unchanged.
    """

    def __init__(self, *, patient: bool = True) -> None:
        self.seen = False
        # None: a handler outside Python, which cannot be restored.
        self._patient = patient and signal.getsignal(signal.SIGINT) is not None
        self._raise, self._raise_next = False, False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        if self._patient:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._patient:
            signal.signal(signal.SIGINT, self._previous)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let Ctrl-C raise; for code that waits."""
        self._raise = True
        try:
            yield
        finally:
            self._raise = False

    @contextmanager
    def at_second(self) -> Iterator[None]:
        """Let the first Ctrl-C set `seen` and the second raise; for work that checks `seen` regularly."""
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
