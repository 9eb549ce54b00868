"""A vendor's operators on host tensors: its own namespaces and schemas, its documented meaning, its documented limits.

An emulator computes what the vendor documents and nothing else, and refuses, with `Violation`, whatever the vendor's
pages forbid: a kernel that passes on it keeps to the documented contract. It proves nothing about the silicon.

Two vendors may use one namespace with different schemas, so each vendor's emulator lives in a process of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from inferplane.plugin import Kernel
from tests.vendors.schemas import TORCH, Restated, differences, full_name, registered

Implementation = Callable[..., Any]
Listener = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]


class Violation(AssertionError):
    """A call that the vendor's documents forbid."""


def require(kept: bool, words: str) -> None:
    """Refuse a call; `words` say what the documents demand and what was given."""
    if not kept:
        raise Violation(words)


class Emulator:
    """One vendor's operators.

    Args:
        restated: their schemas. The namespaces must be free: the vendor's own library is not in this process. Of
            torch's own namespace, `aten`, the operator is there, and gets the implementation for the host.
        implementations: full name -> function with the schema's parameters, on host tensors; one for each schema.

    Raises:
        ValueError: an operator has no implementation, there is one for an operator that is not restated, or one of
            torch's has another schema.
    """

    def __init__(self, restated: Restated, implementations: Mapping[str, Implementation]) -> None:
        stray = sorted(set(restated.schemas) ^ set(implementations))
        if stray:
            raise ValueError(f"restated and emulated operators differ: {', '.join(stray)}")
        self.restated = restated
        self.listeners: list[Listener] = []
        self.libraries: dict[str, torch.library.Library] = {}
        for name, schema in restated.schemas.items():
            namespace = name.partition("::")[0]
            own = namespace != TORCH
            if namespace not in self.libraries:
                self.libraries[namespace] = torch.library.Library(namespace, "DEF" if own else "IMPL")
            library = self.libraries[namespace]
            if own:
                library.define(str(schema).partition("::")[2])
            elif changed := differences(schema, registered(name)):
                raise ValueError(f"torch {torch.__version__}: {'; '.join(changed)}")
            tensors = any("Tensor" in str(a.type) for a in schema.arguments)
            key = "CPU" if tensors else "CompositeExplicitAutograd"
            heard = self._notify_listeners(name, schema, implementations[name])
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning only once for all operators")  # that one is overridden
                library.impl(name.partition("::")[2], heard, key, allow_override=not own)

    def _notify_listeners(self, name: str, schema: Any, function: Implementation) -> Implementation:
        by_keyword = {a.name for a in schema.arguments if a.kwarg_only}
        places = [a.name for a in schema.arguments if not a.kwarg_only]
        defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(places, args)) | kwargs
            assert not set(kwargs) - by_keyword - set(places), (name, kwargs)
            result = function(**{**defaults, **given})
            for listener in self.listeners:
                listener(name, args, kwargs, result)
            return result

        return call

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Within it `listener(name, args, kwargs, result)` is called for every call that was carried out."""
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)


class Implementations(dict[str, Implementation]):
    """A dictionary that collects by decorator: `@emulates("namespace::name")` above the function."""

    def __call__(self, name: str) -> Callable[[Implementation], Implementation]:
        def note(function: Implementation) -> Implementation:
            assert name not in self, name
            self[name] = function
            return function

        return note


def allow_float32(kernel: Kernel) -> Kernel:
    """The kernel, also taking float32."""
    dtypes = kernel.when.dtypes
    if not dtypes or torch.float32 in dtypes:
        return kernel
    return replace(kernel, when=replace(kernel.when, dtypes=(*dtypes, torch.float32)))


class Meddled:
    """An operator namespace in which some operators are called otherwise than a kernel wrote: a mistake, made on
    purpose.

    Args:
        namespace: `torch.ops.<vendor>`.
        changes: operator -> function that gets the real operator and the kernel's arguments.
    """

    def __init__(self, namespace: Any, changes: Mapping[str, Callable[..., Any]]) -> None:
        self._namespace, self._changes = namespace, dict(changes)

    def __getattr__(self, name: str) -> Any:
        real, change = getattr(self._namespace, name), self._changes.get(name)
        return real if change is None else lambda *args, **kwargs: change(real, *args, **kwargs)


__all__ = ["Emulator", "Implementations", "Meddled", "Violation", "allow_float32", "full_name", "require"]
