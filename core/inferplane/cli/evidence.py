"""How far a backend's kernels have been proved, from the dated evidence files beside its package."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferplane.types import Backend

FOLDER = "evidence"
SCHEMA = 1


class Evidence:
    """Evidence of one backend.

    Args:
        files: contents of its evidence files.
    """

    def __init__(self, files: Iterable[Mapping[str, Any]]) -> None:
        self.files = tuple(files)

    @classmethod
    def of(cls, backend: Backend) -> Evidence:
        """What lies in `evidence/` in or beside the backend's package; a wheel need not bring any, and a file that
        cannot be read proves nothing."""
        try:
            package = Path(inspect.getfile(type(backend))).parent
        except (OSError, TypeError):  # a class made at a prompt
            return cls(())
        found = []
        for path in sorted(p for folder in (package, package.parent) for p in (folder / FOLDER).glob("*.json")):
            try:
                content = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(content, dict) and content.get("schema") == SCHEMA and content.get("backend") == backend.name:
                found.append(content)
        return cls(found)

    def level(self, op: str) -> str:
        """The highest level at which an op is proved ("L3"), "" when it is not."""
        return max((str(file["level"]) for file in self.files if _passed(file, op)), default="")


def _passed(file: Mapping[str, Any], op: str) -> bool:
    """Whether a file holds results for an op, and none that failed."""
    results = [r for r in file.get("results", ()) if r.get("op") == op]
    return bool(results) and all(r.get("status") == "passed" for r in results)
