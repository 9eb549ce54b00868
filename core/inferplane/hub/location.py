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
        file: name of its GGUF file, or of the first shard; empty: the folder is the model.
    """

    folder: Path
    commit: str
    file: str = ""

    @property
    def path(self) -> Path:
        """The model's folder, or its GGUF file."""
        return self.folder / self.file if self.file else self.folder
