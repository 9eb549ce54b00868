"""The log: a JSON object a line, or text for a terminal. Prompts and texts are never part of it.

What clients sent (paths, ids) is escaped and cut, so that nobody writes lines of his own into it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import datetime, timezone
from typing import Any

MOST_CHARACTERS = 300
"""Of a value in the log."""
NAMES = ("inferplane", "uvicorn.error")


def safe(value: Any) -> Any:
    """A value as the log may hold it: short, and without control characters."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = str(value)
    cut = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
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


def set_up(form: str, level: str) -> None:
    """Send the log to standard error.

    Args:
        form: "json", "text", or "auto": text on a terminal.
        level: what is logged.
    """
    text = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextLines() if text else JsonLines())
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper() if name == "inferplane" else "CRITICAL")
