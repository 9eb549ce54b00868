"""Where a model lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Location:
    """Where a model lies.

    Args:
        folder: holds its files.
        commit: of the repository; empty where the hub names none.
    """

    folder: Path
    commit: str
