"""What holds up threads of a process that serves: Python's lock, its garbage collector, and the process's end."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
SWITCH_S = 0.0005
"""Seconds; a tenth of Python's own. While a thread reads a large body, the event loop waits so long for Python's lock
after each call of the system. The 99th percentile of passes with 80 such calls beside a reader of 4 MB bodies was
measured at 0.068 s with Python's own, and at 0.013 s with this."""

GARBAGE = 700, 5, 2
"""Thresholds of the collector's generations; Python's own are 700, 10 and 10."""


def switch_threads_often() -> None:
    """Let this process's threads wait for each other for `SWITCH_S` at most, unless C code keeps Python's lock."""
    sys.setswitchinterval(SWITCH_S)


def collect_garbage_often() -> None:
    """Let the garbage collector run several times as often, and so for a fraction of the time: every connection leaves
    cycles, and those of thousands were measured to stop the event loop for 0.24 s. Call it once all that stays is
    frozen (`freeze_gc`), as then a collection visits little else.
    """
    gc.set_threshold(*GARBAGE)


def run_in_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start a function in a daemon thread, and return the future of its result: loading a model may take minutes."""
    answer: Future[T] = Future()

    def run() -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=f"inferplane-{name}", daemon=True).start()
    return answer
