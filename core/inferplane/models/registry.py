"""From an architecture's name to its constructor."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from inferplane.errors import PluginError, UnsupportedModelError
from inferplane.models.build import Build
from inferplane.ops import CausalLM

Constructor = Callable[[Build], CausalLM]

ARCHITECTURES: dict[str, Constructor] = {}
"""Families in core, filled by `architecture`; plugins register more."""


def architecture(name: str) -> Callable[[Constructor], Constructor]:
    """Mark a function of this package as the constructor of an architecture, by its name in config.json."""

    def mark(make: Constructor) -> Constructor:
        ARCHITECTURES[name] = make
        return make

    return mark


def constructor(architecture: str, plugins: Mapping[str, Any] | None = None) -> Constructor:
    """The constructor of an architecture, from core or from a plugin.

    Raises:
        UnsupportedModelError: nobody knows it; lists what is known.
        PluginError: it cannot be imported.
    """
    known = {**(plugins or {}), **ARCHITECTURES}
    target = known.get(architecture)
    if target is None:
        raise UnsupportedModelError(
            f"Architecture {architecture!r} is not known.",
            there_is=", ".join(sorted(known)),
            remedy="add a file with its constructor to inferplane/models, or register one from a plugin: "
            "docs/adding-a-model.md",
        )
    return resolve(target)


def build(b: Build, plugins: Mapping[str, Any] | None = None) -> CausalLM:
    """The tree of ops for a config; nothing is read or allocated."""
    return constructor(b.config.architecture, plugins)(b)


def resolve(target: Any) -> Any:
    """An object from its dotted name "module:name", or itself.

    Raises:
        PluginError: it cannot be imported.
    """
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise PluginError(
            f"{target!r} cannot be imported ({type(error).__name__}: {error}).",
            remedy="mend the plugin that registered it, or exclude it with INFERPLANE_PLUGINS",
        ) from error
