"""Reads a small JSON file as plain data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inferplane.errors import CheckpointError
from inferplane.files import AGAIN
from inferplane.models.reading.json_scanner import read_text

MAX_CONFIG_BYTES = 2**20
"""Largest config that is read: several times the size of the longest published ones."""


def read_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read the entries of a JSON file of at most `max_bytes`.

    Raises:
        CheckpointError: the file is not a regular file, too large, or holds no JSON object.
    """
    try:
        entries = json.loads(read_text(path, max_bytes))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.", remedy=AGAIN) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} holds no JSON object.", remedy=AGAIN)
    return entries
