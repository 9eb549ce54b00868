"""The vendor's Python libraries, imported when a function of theirs is first called."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Library:
    """A module that is imported at the first look at it; what was found is kept.

    Args:
        module: its dotted name.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(import_module(self._module), name)
        setattr(self, name, found)
        return found
