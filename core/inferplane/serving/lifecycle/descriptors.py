"""Open files: the limit of the process, the share of it that connections get, and a loop that has run out of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from typing import Any

OWN_DESCRIPTORS = 64
"""Descriptors that are kept for the process itself: listening sockets, pipes, files; a process with few keeps half."""
REPORT_EVERY_S = 1.0
log = logging.getLogger("inferplane.serving")


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many files as the system allows them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems call the hard limit infinite, and refuse it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit_connections(requested: int) -> int:
    """Return how many connections a process may hold: `requested`, or fewer if it may not open so many files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return requested
    return max(1, min(requested, limit - min(OWN_DESCRIPTORS, limit // 2)))


class LoopErrors:
    """Logs what no one else handles in an event loop: one line a second, with the number of those left out.

    An instance is the loop's exception handler.
    """

    def __init__(self) -> None:
        self._left_out = 0
        self._last: dict[str, Any] = {}
        self._quiet = False

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the loop, or count it.

        Args:
            loop: in which it happened.
            context: `message` and maybe `exception`, as asyncio gives them.
        """
        error = context.get("exception")
        self._last = {"what": context.get("message", "")}
        if error is not None:
            self._last["error"] = f"{type(error).__name__}: {error}"
        if self._quiet:
            self._left_out += 1
            return
        self._report(loop)

    def _report(self, loop: asyncio.AbstractEventLoop) -> None:
        more = {"left_out": self._left_out} if self._left_out else {}
        log.error("error in the event loop", extra={"facts": {**self._last, **more}})
        self._left_out, self._quiet = 0, True
        loop.call_later(REPORT_EVERY_S, self._end_quiet, loop)

    def _end_quiet(self, loop: asyncio.AbstractEventLoop) -> None:
        self._quiet = False
        if self._left_out:
            self._report(loop)
