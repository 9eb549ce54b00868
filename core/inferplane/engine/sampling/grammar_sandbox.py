"""A separate process that compiles grammars first, so that a bad one cannot harm the engine (`grammar_check.py`)."""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

from inferplane.errors import UsageError

START_S = 60.0
"""Maximum seconds for the process to start."""


class GrammarSandbox:
    """A running `grammar_check.py`. Making one waits until the process is ready, at most `START_S` seconds.

    Args:
        setup: for the process: its import path, the tokenizer's JSON text, the vocabulary's size, the end tokens.

    Raises:
        UsageError: the process does not start.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        script = Path(__file__).with_name("grammar_check.py")
        command, pipe, null = [sys.executable, "-I", str(script)], subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True, encoding="utf-8")
        if self.error(setup, START_S):
            self.close()
            what = "Constraints cannot be compiled: the process for that does not start."
            raise UsageError(what, remedy=f"run {sys.executable} -c 'import llguidance'")

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def error(self, message: Any, seconds: float) -> str:
        """Send a grammar (first the setup), wait for the answer, and return the error that it reports, or "" if it
        compiled. If the process crashes, or takes longer than `seconds`, it is killed, and an error says so; then
        `alive` is False.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, and will not answer
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
        with selectors.DefaultSelector() as ready:
            ready.register(stdout, selectors.EVENT_READ)
            if not ready.select(seconds):
                self.close()
                return f"it takes longer than {seconds:g} seconds to compile"
        line = stdout.readline()
        if not line:
            self.close()
            return "it is too deeply nested, or needs too much memory"
        return str(json.loads(line))

    def close(self) -> None:
        """Kill the process, and wait for its end."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # the rest of a message could not be sent
                    pipe.close()

    def __del__(self) -> None:
        if hasattr(self, "_process") and self.alive:
            self.close()
