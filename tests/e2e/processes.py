"""Processes that tests start and interrupt."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heeding_ctrl_c() -> Iterator[None]:
    """What is started inside heeds Ctrl-C, also when this process was started by `nohup ... &`, which ignores it.

    A child inherits SIG_IGN, but no handler: that becomes the default.
    """
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
