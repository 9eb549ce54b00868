"""A test that hangs is reported by its name, and the tests behind it run: tried on one for each of three workers."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.house.rules import REPOSITORY

PLANTED = """
import ctypes, threading
import pytest

@pytest.fixture
def waits_for_ever_at_the_end():
    yield
    threading.Event().wait()

def test_in_python():
    threading.Event().wait()

@pytest.mark.parametrize("number", range(7))
def test_fine_first(number):
    pass

def test_in_c_code_that_holds_the_lock():
    ctypes.PyDLL(None).sleep(3600)

@pytest.mark.parametrize("number", range(7))
def test_fine_second(number):
    pass

def test_in_teardown_after_a_failure(waits_for_ever_at_the_end):
    assert 1 == 2

@pytest.mark.parametrize("number", range(7))
def test_fine_third(number):
    pass
"""


HANGING = {
    "test_in_python": "test_in_python",
    "test_in_c_code_that_holds_the_lock": "test_in_c_code_that_holds_the_lock",
    "test_in_teardown_after_a_failure": "waits_for_ever_at_the_end",
}
"""Tests that hang, and the function in which each does."""


def run_pytest(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "conftest", "--color", "no"]
    command += ["-o", "faulthandler_timeout=12", "-p", "no:cacheprovider", *options, str(path)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)


def test_a_hanging_test_is_named_and_the_others_run(tmp_path: Path) -> None:
    path = tmp_path / "test_planted.py"
    path.write_text(PLANTED)
    # Each also alone: what three workers print as they end may mix, letter by letter.
    options = [("-n", "3", "--dist", "worksteal"), *(("-p", "no:xdist", "-k", name) for name in HANGING)]
    with ThreadPoolExecutor() as pool:
        done, *alone = pool.map(lambda each: run_pytest(path, *each), options)
    said = done.stdout + done.stderr
    crashed = set(re.findall(r"worker 'gw\d+' crashed while running '\S*::(\w+)'", said))
    assert crashed == HANGING.keys(), said
    assert "21 passed" in said and done.returncode == 1, said
    for place, one in zip(HANGING.values(), alone, strict=True):
        assert one.returncode == 1, one
        assert re.search(rf", line \d+ in {place}$", one.stderr, re.MULTILINE), one
