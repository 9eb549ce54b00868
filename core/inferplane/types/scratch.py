"""What is computed once for an object and dies with it: a step's lengths, a weight's description, cache pointers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from typing_extensions import Self

T = TypeVar("T")


class Scratch:
    """Gives an object `once`. A copy made by `dataclasses.replace` starts with nothing remembered."""

    def once(self, key: Hashable, make: Callable[..., T], *args: Any) -> T:
        """The result of `make(*args)`, which is called the first time only.

        Args:
            key: names the result within this object; begin it with the package of the caller: "inferplane_x.lengths".
            make: computes it. When it raises, nothing is stored and the next call tries again.
            args: arguments of `make`. The result must not refer to this object, which stores it: only the garbage
                collector would then free the two.
        """
        # An attribute, not self.__dict__: asking for an object's dict makes CPython 3.11 read its attributes slower.
        stored: dict[Hashable, Any] | None = getattr(self, "_scratch", None)
        if stored is None:
            stored = {}
            object.__setattr__(self, "_scratch", stored)  # dataclasses that have it are frozen
        elif key in stored:
            return stored[key]
        made = stored[key] = make(*args)
        return made

    def copy_with(self, **attributes: Any) -> Self:
        """A shallow copy with these attributes, which remembers nothing."""
        copied = copy.copy(self)
        copied._set_anew(attributes)
        return copied

    def _set_anew(self, attributes: dict[str, Any]) -> None:
        """Set attributes, and forget what was computed from those before."""
        for name, value in {**attributes, "_scratch": None}.items():
            object.__setattr__(self, name, value)
