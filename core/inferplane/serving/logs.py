"""The log: a JSON object a line, or text for a terminal. Prompts and texts are never part of it.

What clients sent (paths, ids) is escaped and cut, so that nobody writes lines of his own into it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, TextIO

from inferplane.errors import InferplaneError

MAX_CHARACTERS = 300
"""Of a value in the log."""
MAX_LINES = 10_000
"""Lines that may wait for a slow reader."""
PIPE_ATOMIC_BYTES = 4096
"""A pipe takes so many from one process before it takes any from another (`PIPE_BUF` of Linux)."""
GATHER_S = 0.02
"""Lines that come within this time are written together: each time the thread wakes, the server's own one waits."""
NAMES = {
    "inferplane": "",
    "uvicorn.error": "CRITICAL",
    "opentelemetry": "WARNING",
    "opentelemetry.trace": "CRITICAL",  # warns with what clients send in tracestate
}
"""Loggers whose lines are ours to write, and from what level on; "": as the settings say."""


def safe(value: Any) -> Any:
    """A value as the log may hold it: short, and without control characters."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = str(value)
    cut = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in cut)


class JsonLines(logging.Formatter):
    """One JSON object a record: time, level, event, facts."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        data = {"time": when, "level": record.levelname.lower(), "event": safe(record.getMessage())}
        data.update({name: safe(value) for name, value in getattr(record, "facts", {}).items()})
        if record.exc_info:
            data["trace"] = self.formatException(record.exc_info)[-4000:]
        return json.dumps(data)


class TextLines(logging.Formatter):
    """A line for eyes: time, level, event, facts."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        facts = "".join(f"  {name}={safe(value)}" for name, value in getattr(record, "facts", {}).items())
        line = f"{clock} {record.levelname.lower():<8}{safe(record.getMessage())}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Writer(logging.Handler):
    """Writes lines in a thread of its own: whoever reads the log slowly must not keep the server waiting.

    Args:
        out: where to; lines that find `MAX_LINES` before them are dropped, and counted in a line of their own.
        everywhere: facts of every line.
    """

    def __init__(self, out: TextIO, everywhere: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._everywhere = everywhere or {}
        self._out, self._dropped = out, 0
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._thread = threading.Thread(target=self._write, name="inferplane-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._everywhere:
            record.facts = {**self._everywhere, **getattr(record, "facts", {})}
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1

    def finish(self, patience_s: float = 2.0) -> None:
        """Write what is left, if somebody reads it in time."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=patience_s)
            self._thread.join(patience_s)

    def _write(self) -> None:
        ended = False
        while not ended:
            lines = [self._lines.get()]
            time.sleep(GATHER_S)
            with contextlib.suppress(queue.Empty):
                while lines[-1] is not None:
                    lines.append(self._lines.get_nowait())
            ended = lines[-1] is None
            text = [line for line in lines if line is not None]
            dropped, self._dropped = self._dropped, 0
            if dropped:
                text.append(f'{{"event": "lines dropped", "count": {dropped}}}')
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                for piece in _pieces(text):
                    self._out.write(piece)
                    self._out.flush()


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Whole lines together, as many as a pipe takes at once: other processes' lines are never within them."""
    piece = ""
    for line in lines:
        if piece and len(piece) + len(line) >= PIPE_ATOMIC_BYTES:
            yield piece
            piece = ""
        piece += f"{line}\n"
    if piece:
        yield piece


def finish() -> None:
    """Write what is left of the log."""
    for handler in logging.getLogger("inferplane").handlers:
        if isinstance(handler, Writer):
            handler.finish()


def is_json(form: str) -> bool:
    """Whether a log of this form has JSON lines; `form` as for `set_up`."""
    return form == "json" or (form == "auto" and not sys.stderr.isatty())


def log_fatal(error: Exception, **everywhere: Any) -> None:
    """Write the error that ends the process as the log's last line, in JSON and whole, be the log set up or not.

    Args:
        error: see above.
        everywhere: facts of every line.
    """
    finish()
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    data = {"time": now, "level": "error", "event": "failed", **everywhere}
    if isinstance(error, InferplaneError):
        said = {"what": error.what, "there_is": error.there_is, "to_do": error.remedy}
        data.update({name: words for name, words in said.items() if words})
    else:
        data["what"] = f"{type(error).__name__}: {error}"
        data["trace"] = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-4000:]
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(json.dumps(data) + "\n")
        sys.stderr.flush()


def set_up(form: str, level: str, **everywhere: Any) -> None:
    """Send the log to standard error.

    Args:
        form: "json", "text", or "auto": text on a terminal.
        level: what is logged.
        everywhere: facts of every line.
    """
    handler = Writer(sys.stderr, everywhere)
    handler.setFormatter(JsonLines() if is_json(form) else TextLines())
    for name, least in NAMES.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least or level.upper())
