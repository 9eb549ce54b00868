"""A separate process that compiles grammars first, so that a bad one cannot harm the engine (`grammar_check.py`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from inferplane.confined import ConfinedProcess
from inferplane.engine.sampling.grammar_check import MEMORY_BYTES
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
        try:
            self._process = ConfinedProcess(script, setup, START_S, MEMORY_BYTES)
        except (TimeoutError, EOFError):
            what = "Constraints cannot be compiled: the process for that does not start."
            raise UsageError(what, remedy=f"run {sys.executable} -c 'import llguidance'") from None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.alive

    def error(self, grammar: str, seconds: float) -> str:
        """Send a grammar, wait for the answer, and return the error that it reports, or "" if it compiled. If the
        process crashes, or takes longer than `seconds`, it is killed, and an error says so; then `alive` is False.
        """
        try:
            return str(self._process.ask(grammar, seconds))
        except TimeoutError:
            return f"it takes longer than {seconds:g} seconds to compile"
        except EOFError:
            return "it is too deeply nested, or needs too much memory"

    def close(self) -> None:
        """Kill the process, and wait for its end."""
        self._process.close()
