"""Ctrl-C as a request to stop at the next safe place."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While it lasts, the first Ctrl-C sets `seen`; the second raises KeyboardInterrupt, as ever.

    An exception in the middle of a step could leave a scheduler and its blocks at odds; between two tokens nothing can.

    Args:
        patient: False leaves Ctrl-C as it is.
    """

    def __init__(self, *, patient: bool = True) -> None:
        self.seen, self._patient = False, patient
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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
