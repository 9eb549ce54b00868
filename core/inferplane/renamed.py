"""Old names of promised fields and keywords, which keep working for one minor release with a DeprecationWarning."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from inferplane.errors import UsageError, deprecation_message

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class NewName:
    """The present name of a field or method.

    Args:
        name: the present name.
        to_new: value under the old name -> value under the present one; called with keyword arguments that still use
            the old name.
        to_old: the reverse, for reading the old attribute.
        warns: False if the class itself warns, in words of its own.
    """

    name: str
    to_new: Callable[[Any], Any] = lambda value: value
    to_old: Callable[[Any], Any] = lambda value: value
    warns: bool = True


def old_names(renamed: Mapping[str, str | NewName]) -> Callable[[type[C]], type[C]]:
    """Class decorator: `@old_names({"old": "new"})` accepts `old` as a constructor keyword and as an attribute.

    Args:
        renamed: old name -> present name.
    """
    by_old = {old: new if isinstance(new, NewName) else NewName(new) for old, new in renamed.items()}

    def decorate(cls: type[C]) -> type[C]:
        init = cls.__init__
        has_no_old_name = frozenset(by_old).isdisjoint

        @functools.wraps(init)
        def accept_old_names(self: C, *args: Any, **options: Any) -> None:
            if not has_no_old_name(options):
                for old in by_old.keys() & options.keys():
                    new = by_old[old]
                    if new.warns:
                        warn_of_old_name(f"{cls.__name__}.{old}", new.name)
                    if new.name in options and not _is_called_by_replace():
                        raise UsageError(f"{old} and {new.name} are the same.", remedy=f"pass {new.name} alone")
                    options[new.name] = new.to_new(options.pop(old))
            init(self, *args, **options)

        cls.__init__ = accept_old_names  # type: ignore[assignment]
        return old_attributes(by_old)(cls)

    return decorate


def old_attributes(renamed: Mapping[str, str | NewName]) -> Callable[[type[C]], type[C]]:
    """Class decorator: objects can be read by old names, for attributes that are not set by a constructor's keyword.

    Args:
        renamed: old name -> present name.
    """

    def decorate(cls: type[C]) -> type[C]:
        for old, new in renamed.items():
            new = new if isinstance(new, NewName) else NewName(new)
            setattr(cls, old, property(functools.partial(_read_old, cls, old, new)))
        return cls

    return decorate


def old_keywords(**renamed: str) -> Callable[[F], F]:
    """Decorator of a function or method: `@old_keywords(old="new")` accepts `old` as a keyword argument."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def accept_old_keywords(*args: Any, **options: Any) -> Any:
            for old in renamed.keys() & options.keys():
                new = renamed[old]
                warn_of_old_name(f"{old} of {function.__qualname__}", new)
                if new in options:
                    raise UsageError(f"{old} and {new} are the same.", remedy=f"pass {new} alone")
                options[new] = options.pop(old)
            return function(*args, **options)

        return accept_old_keywords  # type: ignore[return-value]

    return decorate


def old_names_of_module(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module that accepts old names of its functions, classes and values.

    Args:
        module: `__name__` of the module.
        renamed: old name -> present name, in the same module or as "package.module:name".
    """

    def read_old_name(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_of_old_name(f"{module}.{name}", renamed[name])
        home, _, new = renamed[name].rpartition(":")
        return getattr(importlib.import_module(home or module), new)

    return read_old_name


def warn_of_old_name(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that something has another name now. `stacklevel` counts as in `warnings.warn`, from the caller."""
    warnings.warn(deprecation_message(old, new), DeprecationWarning, stacklevel=stacklevel)


def _read_old(cls: type, old: str, new: NewName, instance: Any) -> Any:
    value = getattr(instance, new.name)
    if new.warns:
        warn_of_old_name(f"{cls.__name__}.{old}", new.name)
    return new.to_old(value)


def _is_called_by_replace() -> bool:
    """True if the constructor runs for `dataclasses.replace`, which passes every field that its caller left alone."""
    return sys._getframe(2).f_globals.get("__name__") == dataclasses.__name__
