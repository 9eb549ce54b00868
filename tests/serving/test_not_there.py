"""A missing model or device is reported before anything listens, in the same words as by other commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

INFERPLANE = (sys.executable, "-m", "inferplane")


@pytest.mark.parametrize(
    ("words", "code"),
    [(("/no/such/folder",), 2), (("--device", "toaster"), 1)],
    ids=["model", "device"],
)
def test_nothing_listens(words, code):
    serving = [*INFERPLANE, "serve", "--port", "0", "--log-format", "text"]
    serve = subprocess.run([*serving, *words], capture_output=True, text=True, check=False)
    other = subprocess.run([*INFERPLANE, "generate", "-p", "x", *words], capture_output=True, text=True, check=False)
    assert serve.returncode == other.returncode == code
    assert serve.stderr == other.stderr
    assert serve.stderr.startswith("error: ")
