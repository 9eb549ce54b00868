"""Finds the constructor of a model by the name of its architecture."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from inferplane.errors import PluginError, UnsupportedModelError
from inferplane.models.build import Build
from inferplane.ops import CausalLM

Constructor = Callable[[Build], CausalLM]

ARCHITECTURES: dict[str, Constructor] = {}
"""The constructors in core by architecture; the decorator `architecture` fills it, plugins register more."""


def architecture(name: str) -> Callable[[Constructor], Constructor]:
    """Register the decorated function as the constructor of an architecture, by its name in config.json."""

    def mark(make: Constructor) -> Constructor:
        ARCHITECTURES[name] = make
        return make

    return mark


def constructor(architecture: str, plugins: Mapping[str, Any] | None = None) -> Constructor:
    """Find the constructor of an architecture, in core or in a plugin.

    Raises:
        UnsupportedModelError: there is none; the message lists the architectures that have one.
        PluginError: the constructor cannot be imported.
    """
    known = {**(plugins or {}), **ARCHITECTURES}
    target = known.get(architecture)
    if target is None:
        raise UnsupportedModelError(
            f"Architecture {architecture!r} is not known.",
            there_is=", ".join(sorted(known)),
            remedy="add a file with its constructor to inferplane/models/families, or register one from a plugin: "
            "docs/adding-a-model.md",
        )
    return resolve(target)


def build(build: Build, plugins: Mapping[str, Any] | None = None) -> CausalLM:
    """Build the tree of ops for a config. Nothing is read or allocated."""
    return constructor(build.config.architecture, plugins)(build)


def resolve(target: Any) -> Any:
    """Return the object with the dotted name "module:name"; return anything but a string unchanged.

    Raises:
        PluginError: the object cannot be imported.
    """
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise PluginError(
            f"{target!r} cannot be imported ({type(error).__name__}: {error}).",
            remedy="repair the plugin that registered it, or exclude it with INFERPLANE_PLUGINS",
        ) from error
