"""Renders a chat template in a process of its own, with limits of time, size and memory.

A template comes with a checkpoint and is a program. Jinja's sandbox keeps it from accessing the machine, not from
looping. So it runs in a process that is confined and can be killed (`render.py` in `inferplane.confined`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any, Literal

from inferplane.confined import ConfinedProcess
from inferplane.dialogue import render

RENDER_S = 2.0
"""Most seconds for one conversation."""
START_S = 30.0
"""Most seconds for the start of the process."""
Reason = Literal["refused", "too_slow", "template_failed"]


class RenderError(Exception):
    """A conversation is not rendered.

    Args:
        reason: "refused" by the template; "too_slow"; "template_failed": it does not compile, or its process ended.
        message: what the template says, or what happened.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message


class Renderer:
    """One template. Its process starts at the first use, and again after it was killed. Threads take turns.

    Args:
        source: the Jinja template.
        tokens: special tokens by their names in templates.
        render_s: most seconds for one conversation.
    """

    def __init__(self, source: str, tokens: Mapping[str, Any], render_s: float = RENDER_S) -> None:
        self._setup = {"path": sys.path, "template": source}
        self._tokens, self._render_s = dict(tokens), render_s
        self._process: ConfinedProcess | None = None
        self._lock = threading.Lock()

    @property
    def process(self) -> ConfinedProcess | None:
        """The process, while it runs."""
        return self._process if self._process is not None and self._process.alive else None

    def render(self, given: Mapping[str, Any]) -> str:
        """Render a conversation; `given` are the template's variables beside its tokens.

        Raises:
            RenderError: the template refuses it, takes too long, does not compile, or its process ends.
        """
        with self._lock:
            seconds = START_S
            try:
                if self.process is None:
                    self._process = ConfinedProcess(render.__file__, self._setup, START_S)
                assert self._process is not None
                if "error" in self._process.setup_answer:
                    message = str(self._process.setup_answer["error"])
                    self._process.close()
                    raise RenderError("template_failed", message)
                seconds = self._render_s
                answer = self._process.ask({**self._tokens, **given}, seconds)
            except TimeoutError:
                what = f"The chat template takes longer than {seconds:g} s for these messages."
                raise RenderError("too_slow", what) from None
            except EOFError:
                raise RenderError(
                    "template_failed", "The chat template cannot be rendered: its process ended."
                ) from None
        if "error" in answer:
            raise RenderError("refused", answer["error"])
        return str(answer["text"])

    def close(self) -> None:
        """Kill the process, also while it renders."""
        if self._process is not None:
            self._process.close()
