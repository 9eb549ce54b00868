"""How a download reports: sentences, and a count of bytes that terminals alone show."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INTERVAL_S = 0.2


@dataclass(frozen=True)
class DownloadProgress:
    """The functions that a download reports to.

    Args:
        say: takes a sentence.
        count: takes the bytes that are there, and those in all.
    """

    say: Callable[[str], None]
    count: Callable[[int, int], None]


SILENT = DownloadProgress(lambda words: None, lambda done, total: None)


@contextmanager
def report_on_stderr() -> Iterator[DownloadProgress]:
    """Report on standard error: sentences always, the count on one line of a terminal."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    newest = 0.0
    shown = False

    def say(words: str) -> None:
        nonlocal shown
        if sys.stderr is not None:
            sys.stderr.write(f"{_clear(shown)}{words}\n")
            sys.stderr.flush()
        shown = False

    def count(done: int, total: int) -> None:
        nonlocal newest, shown
        now = time.monotonic()
        if terminal and (now - newest >= INTERVAL_S or done >= total):
            newest, shown = now, True
            sys.stderr.write(f"\r  {format_size(done)} of {format_size(total)}   ")
            sys.stderr.flush()

    try:
        yield DownloadProgress(say, count)
    finally:
        if shown:
            sys.stderr.write(_clear(shown))
            sys.stderr.flush()


def _clear(shown: bool) -> str:
    """What replaces the line of the count."""
    return f"\r{' ' * 40}\r" if shown else ""


def format_size(count: float) -> str:
    """Bytes in words, with units as hubs show them, powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
