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
    """A running `grammar_check.py`."""

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
        """Send `message` and return the error it reports, or "". Kills the process after `seconds`."""
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
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # the rest of a message could not be sent
                    pipe.close()

    def __del__(self) -> None:
        if hasattr(self, "_process") and self.alive:
            self.close()
