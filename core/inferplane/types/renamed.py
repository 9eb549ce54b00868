"""Old names of promised fields, which keep working for one minor release with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from inferplane.errors import UsageError

C = TypeVar("C")


@dataclass(frozen=True)
class NewName:
    """The present name of a field or method.

    Args:
        name: the present name.
        to_new: value under the old name -> value under the present one; called with keyword arguments that still use
            the old name.
        to_old: the reverse, for reading the old attribute.
    """

    name: str
    to_new: Callable[[Any], Any] = lambda value: value
    to_old: Callable[[Any], Any] = lambda value: value


def old_names(renamed: Mapping[str, str | NewName]) -> Callable[[type[C]], type[C]]:
    """Class decorator: `@old_names({"old": "new"})` accepts `old` as a constructor keyword and as an attribute.

    Args:
        renamed: old name -> present name.
    """
    by_old = {old: new if isinstance(new, NewName) else NewName(new) for old, new in renamed.items()}

    def decorate(cls: type[C]) -> type[C]:
        init = cls.__init__

        @functools.wraps(init)
        def accept_old_names(self: C, *args: Any, **options: Any) -> None:
            if not by_old.keys().isdisjoint(options):
                for old in by_old.keys() & options.keys():
                    new = by_old[old]
                    _warn(cls, old, new.name)
                    if new.name in options:
                        raise UsageError(f"{old} and {new.name} are the same.", remedy=f"pass {new.name} alone")
                    options[new.name] = new.to_new(options.pop(old))
            init(self, *args, **options)

        cls.__init__ = accept_old_names  # type: ignore[assignment]
        for old, new in by_old.items():
            setattr(cls, old, property(functools.partial(_read_old, cls, old, new)))
        return cls

    return decorate


def _read_old(cls: type, old: str, new: NewName, instance: Any) -> Any:
    _warn(cls, old, new.name)
    return new.to_old(getattr(instance, new.name))


def _warn(cls: type, old: str, new: str) -> None:
    warnings.warn(
        f"{cls.__name__}.{old} is called {new} now; the old name ends with the next minor release.",
        DeprecationWarning,
        stacklevel=3,
    )
