"""How late the event loop that serves runs: work that does not yield holds up every client, and health on that loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TICK_S, WINDOW_S = 0.05, 5.0
NOT_READY_S = 5.0
"""Seconds in which the loop has not turned after which the server is not ready, on the port of health."""


class LoopLag:
    """Measures an event loop's lag; any thread may read it.

    Args:
        report: called with `worst_s` about once a second; None: nothing is called.
    """

    def __init__(self, report: Callable[[float], object] | None = None) -> None:
        self._report = report
        self._ticked_at: float | None = None
        self._worst = self._worst_before = 0.0

    async def watch(self) -> None:
        """Measure the loop that runs this; ends by being cancelled."""
        window_end = report_at = 0.0
        try:
            while True:
                self._ticked_at = time.monotonic()
                if self._ticked_at >= window_end:
                    self._worst_before, self._worst = self._worst, 0.0
                    window_end = self._ticked_at + WINDOW_S
                if self._report is not None and self._ticked_at >= report_at:
                    self._report(self.worst_s)
                    report_at = self._ticked_at + 1.0
                await asyncio.sleep(TICK_S)
                self._worst = max(self._worst, self.stuck_s)
        finally:
            self._ticked_at = None

    @property
    def stuck_s(self) -> float:
        """Seconds by which the loop is late right now; 0 while it is not measured."""
        ticked_at = self._ticked_at
        return 0.0 if ticked_at is None else max(time.monotonic() - ticked_at - TICK_S, 0.0)

    @property
    def worst_s(self) -> float:
        """The longest lag of the last 5 to 10 s, in seconds."""
        return max(self._worst, self._worst_before, self.stuck_s)
