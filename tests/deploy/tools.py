"""Tools that check what is deployed: `make lint` has them all, elsewhere a test without its tool is skipped."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.house.rules import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
REQUIRED = os.environ.get("INFERPLANE_DEPLOY_TOOLS") == "required"
"""`make lint` sets it: what the extra `lint` brings is there, or the test fails."""


def missing(what: str, *, in_lint: bool = True) -> None:
    """Skip the test with its reason; fail if the tool has to be there."""
    words = f"not checked: {what} is not here" + (" (`make lint` has it)" if in_lint else "")
    if in_lint and REQUIRED:
        pytest.fail(words)
    pytest.skip(words)


def find_program(name: str, *, in_lint: bool = True) -> str:
    """Path of a program, beside this Python or on PATH; else the test is skipped."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        missing(name, in_lint=in_lint)
    return str(found)


def need_module(name: str) -> None:
    """Skip the test if a module cannot be imported."""
    if find_spec(name) is None:
        missing(name)
