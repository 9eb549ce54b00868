"""Work in a thread that does not keep the process from ending, such as loading a model, which may take minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start a function in a daemon thread, and return the future of its result."""
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
