"""What is computed once for an object and dies with it: a step's lengths, a weight's description, cache pointers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Scratch:
    """Gives an object `once`. A copy made by `dataclasses.replace` starts with nothing remembered."""

    def once(self, key: Hashable, make: Callable[..., T], *args: Any) -> T:
        """The result of `make(*args)`, which is called the first time only.

        Args:
            key: names the result within this object; begin it with the package that asks: "inferplane_x.lengths".
            make: computes it. When it raises, nothing is kept and the next call tries again.
            args: what `make` is given. It may not keep the object itself, which would then keep itself alive.
        """
        # An attribute, not self.__dict__: asking for an object's dict makes CPython 3.11 read its attributes slower.
        kept: dict[Hashable, Any] | None = getattr(self, "_scratch", None)
        if kept is None:
            kept = {}
            object.__setattr__(self, "_scratch", kept)  # dataclasses that have it are frozen
        elif key in kept:
            return kept[key]
        made = kept[key] = make(*args)
        return made
