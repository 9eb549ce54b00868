"""Reads how far a backend's kernels are proved from the dated evidence files beside its package."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferplane.types import Backend

FOLDER = "evidence"
SCHEMA = 1
NONE = "none"
LEVELS = (NONE, "L0", "L1", "L2", "L3", "L4", "L5")


class Evidence:
    """The evidence of one backend.

    Args:
        files: contents of its evidence files.
    """

    def __init__(self, files: Iterable[Mapping[str, Any]]) -> None:
        self.files = tuple(files)

    @classmethod
    def of(cls, backend: Backend) -> Evidence:
        """Read `evidence/` in or beside the backend's package, at any depth; a wheel may have none, and an unreadable
        file proves nothing."""
        try:
            file = Path(inspect.getfile(type(backend)))
        except (OSError, TypeError):  # a class defined at an interactive prompt
            return cls(())
        package = getattr(sys.modules.get(type(backend).__module__), "__package__", None) or ""
        folders = list(file.parents)[: len(package.split(".")) + 1]
        found = []
        for path in sorted(p for folder in folders for p in (folder / FOLDER).glob("*.json")):
            try:
                content = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(content, dict) and content.get("schema") == SCHEMA and content.get("backend") == backend.name:
                found.append(content)
        return cls(found)

    def level(self, name: str, kernel: str = "") -> str:
        """The highest level at which an op or feature is proved ("L3"), "" when it is not.

        Args:
            name: the op or feature.
            kernel: full name of a kernel, to count only the cases that name it.
        """
        proved = max(
            (str(f["level"]) for f in self.files if _has_passed(f, name, kernel)), key=LEVELS.index, default=NONE
        )
        if any(r.get("op") == name for f in self.files for r in f["results"]):
            # An end-to-end run proves its ops one by one, which is L3, whatever else it proves.
            proved = "L3" if proved == "L4" else proved
        return "" if proved == NONE else proved


def _has_passed(file: Mapping[str, Any], name: str, kernel: str) -> bool:
    """Whether a file has passed results for an op or feature, and no failed one."""
    named = re.compile(rf"(?<![\w.:]){re.escape(kernel)}(?![\w.:])")
    rows = [r for r in file.get("results", ()) if (r.get("op") or r.get("feature")) == name]
    rows = [r for r in rows if not kernel or named.search(str(r.get("case")))]
    judged = [r for r in rows if r.get("status") != "refused"]  # a refusal proves nothing
    return bool(judged) and all(r.get("status") == "passed" for r in judged) and file.get("level") in LEVELS
