"""A vendor's Python libraries, imported when a function of theirs is first called."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any


class Library:
    """A module, or a class in one, that is imported when an attribute is first read; attributes are cached.

    Args:
        name: its dotted name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(resolve_name(self._name), name)
        setattr(self, name, found)
        return found
