"""The log: one JSON object per line, or text for a terminal. It never contains prompts or generated text.

What clients send (paths, ids) is escaped and truncated, so that no client can write lines of its own into it.
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
"""Longest value in the log, in characters."""
MAX_LINES = 10_000
"""Most lines that wait for a slow reader."""
PIPE_ATOMIC_BYTES = 4096
"""A pipe does not interleave a write of up to this size with other processes' writes (`PIPE_BUF` of Linux)."""
BATCH_S = 0.02
"""Lines within this time are written together: whenever the log's thread runs, the server's thread has to wait."""
LOGGERS = {
    "inferplane": "",
    "uvicorn.error": "CRITICAL",
    "opentelemetry": "WARNING",
    "opentelemetry.trace": "CRITICAL",  # its warnings contain what clients send in tracestate
}
"""Loggers whose lines are written, and their lowest level; "": the level of the settings."""


def sanitize(value: Any) -> Any:
    """Return a value as the log may hold it: short, and without control characters."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = str(value)
    short = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
    if short.isprintable():
        return short
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in short)


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: time, level, event, facts."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        data = {"time": when, "level": record.levelname.lower(), "event": sanitize(record.getMessage())}
        data.update({name: sanitize(value) for name, value in getattr(record, "facts", {}).items()})
        if record.exc_info:
            data["trace"] = self.formatException(record.exc_info)[-4000:]
        return json.dumps(data)


class TextLines(logging.Formatter):
    """Formats a record as text: time, level, event, facts."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        facts = "".join(f"  {name}={sanitize(value)}" for name, value in getattr(record, "facts", {}).items())
        line = f"{clock} {record.levelname.lower():<8}{sanitize(record.getMessage())}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Writer(logging.Handler):
    """Writes lines in a thread of its own, so that a slow reader of the log does not delay the server.

    Args:
        out: where to write. If `MAX_LINES` lines wait, further lines are dropped, and a line tells their number.
        common_facts: facts of every line.
    """

    def __init__(self, out: TextIO, common_facts: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._common_facts = common_facts or {}
        self._out, self._dropped = out, 0
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._thread = threading.Thread(target=self._write, name="inferplane-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._common_facts:
            record.facts = {**self._common_facts, **getattr(record, "facts", {})}
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1

    def finish(self, timeout_s: float = 2.0) -> None:
        """Write the remaining lines, if they are read in time."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _write(self) -> None:
        ended = False
        while not ended:
            lines = [self._lines.get()]
            time.sleep(BATCH_S)
            with contextlib.suppress(queue.Empty):
                while lines[-1] is not None:
                    lines.append(self._lines.get_nowait())
            ended = lines[-1] is None
            text = [line for line in lines if line is not None]
            dropped, self._dropped = self._dropped, 0
            if dropped:
                text.append(f'{{"event": "lines dropped", "count": {dropped}}}')
            with contextlib.suppress(OSError, ValueError):  # the reader has closed it
                for piece in _join_lines(text):
                    self._out.write(piece)
                    self._out.flush()


def _join_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines joined into writes that a pipe does not interleave with those of other processes."""
    piece = ""
    for line in lines:
        if piece and len(piece) + len(line) >= PIPE_ATOMIC_BYTES:
            yield piece
            piece = ""
        piece += f"{line}\n"
    if piece:
        yield piece


def finish() -> None:
    """Write the remaining lines of the log."""
    for handler in logging.getLogger("inferplane").handlers:
        if isinstance(handler, Writer):
            handler.finish()


def is_json(log_format: str) -> bool:
    """Return whether a log of this format has JSON lines; `log_format` as for `set_up`."""
    return log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())


def log_fatal(error: Exception, **common_facts: Any) -> None:
    """Write an error as the log's last line, in JSON and not truncated, whether or not the log is set up.

    Args:
        error: ends the process.
        common_facts: facts of every line.
    """
    finish()
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    data = {"time": now, "level": "error", "event": "failed", **common_facts}
    if isinstance(error, InferplaneError):
        parts = {"what": error.what, "there_is": error.there_is, "to_do": error.remedy}
        data.update({name: words for name, words in parts.items() if words})
    else:
        data["what"] = f"{type(error).__name__}: {error}"
        data["trace"] = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-4000:]
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(json.dumps(data) + "\n")
        sys.stderr.flush()


def set_up(log_format: str, level: str, **common_facts: Any) -> None:
    """Send the log to standard error.

    Args:
        log_format: "json", "text", or "auto": text on a terminal.
        level: the lowest level that is logged.
        common_facts: facts of every line.
    """
    handler = Writer(sys.stderr, common_facts)
    handler.setFormatter(JsonLines() if is_json(log_format) else TextLines())
    for name, lowest in LOGGERS.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(lowest or level.upper())
