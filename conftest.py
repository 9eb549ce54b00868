"""A test that hangs, in whatever phase: its process prints where and ends, and xdist names the test and goes on.

pytest has a timer for that (`faulthandler_timeout` in pyproject.toml), which works while C code holds the interpreter's
lock, too. But before pytest 9 it only prints; and pytest stops it as soon as a test fails, or runs pytest itself, so
that a teardown which then waits for ever is not noticed. It is started again here for each phase.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator

import pytest

STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr: that of a test is captured, and lost when its process ends."""
    if config.pluginmanager.hasplugin("faulthandler") and sys.__stderr__ is not None:
        config.stash[STDERR] = os.dup(sys.__stderr__.fileno())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close what `pytest_configure` has opened."""
    if STDERR in config.stash:
        os.close(config.stash[STDERR])


def start_timer(config: pytest.Config) -> None:
    """End this process after `faulthandler_timeout` seconds. pytest stops the timer when a test is over."""
    seconds = float(config.getini("faulthandler_timeout") or 0)
    if seconds > 0 and STDERR in config.stash:
        faulthandler.dump_traceback_later(seconds, file=config.stash[STDERR], exit=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Start the timer for the setup and the call."""
    start_timer(item.config)
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Start the timer for the teardown."""
    start_timer(item.config)
    yield
