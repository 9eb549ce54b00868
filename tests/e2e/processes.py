"""Processes that tests start and interrupt."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


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


def wait_for_output(process: subprocess.Popen[Any], seconds: float) -> None:
    """Wait until a process has printed something, or has closed its output. One that does neither in time is killed."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], seconds)[0]:
        raise AssertionError(f"it prints nothing for {seconds} seconds\n{kill(process)}")


def kill(process: subprocess.Popen[Any]) -> str:
    """Kill a process, and its group if it leads one; return what it has printed to stderr, without waiting for it long.

    A process that it has started, in another group, may keep the pipe open for ever.
    """
    with suppress(ProcessLookupError):
        leads = os.getpgid(process.pid) == process.pid
        (os.killpg if leads else os.kill)(process.pid, signal.SIGKILL)
    try:
        err = process.communicate(timeout=10)[1]
    except subprocess.TimeoutExpired:
        return "(its stderr is still open: another process that it started has not ended)"
    return err.decode(errors="replace") if isinstance(err, bytes) else err or ""
