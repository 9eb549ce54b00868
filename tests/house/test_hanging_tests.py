"""A test that hangs is reported by its name, and the tests behind it run: tried on one for each of three workers."""

from __future__ import annotations

import re
import subprocess
import sys
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


def test_a_hanging_test_is_named_and_the_others_run(tmp_path: Path) -> None:
    path = tmp_path / "test_planted.py"
    path.write_text(PLANTED)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "3",
        "--dist",
        "worksteal",
        "-c",
        "pyproject.toml",
        "-p",
        "conftest",
        "--color",
        "no",
    ]
    command += ["-o", "faulthandler_timeout=12", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    said = done.stdout + done.stderr
    crashed = set(re.findall(r"worker 'gw\d+' crashed while running '\S*::(\w+)'", said))
    assert crashed == {"test_in_python", "test_in_c_code_that_holds_the_lock", "test_in_teardown_after_a_failure"}, said
    assert "21 passed" in said and done.returncode == 1, said
    places = set(re.findall(r", line \d+ in (\w+)$", said, re.MULTILINE))
    assert {"test_in_python", "test_in_c_code_that_holds_the_lock", "waits_for_ever_at_the_end"} <= places, said
