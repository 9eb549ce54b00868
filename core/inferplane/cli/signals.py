"""Ctrl-C and SIGTERM: as exceptions that put things in order, and as a request to stop at the next safe place."""

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
    """SIGTERM: what is open is closed, and processes that were started are ended."""


def run_with_signals(main: Callable[[], int]) -> int:
    """What `main` returns, with signals that reach it as exceptions; behind it they end the process at once.

    Signals that whoever started the process wants ignored stay ignored. A launcher of several ranks sees to SIGTERM
    itself: a rank that waits for another in a collective cannot answer, and is simply ended.
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
    """A handler for both: raises KeyboardInterrupt or Terminated, or ends the process where that would do harm."""
    if _importing(frame):
        # Extension modules lose an exception that comes while they are imported, or abort. There is nothing to put in
        # order but the cursor, which a progress bar hides.
        if sys.stderr is not None and sys.stderr.isatty():
            os.write(sys.stderr.fileno(), SHOW_CURSOR)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _importing(frame: FrameType | None) -> bool:
    """Whether the code of a frame runs because a module is imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class Interrupt:
    """While it lasts, Ctrl-C only sets `seen`, except where `at_once` or `at_second` let it raise KeyboardInterrupt.

    An exception in the middle of a step could leave a scheduler and its blocks at odds, and one that comes while the
    last is being dealt with would end a program that is to go on.

    Args:
        patient: False leaves Ctrl-C as it is.
    """

    def __init__(self, *, patient: bool = True) -> None:
        self.seen = False
        self._patient = patient and signal.getsignal(signal.SIGINT) is not None  # None: not Python's, so never put back
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
