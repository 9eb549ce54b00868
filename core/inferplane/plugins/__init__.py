"""Finds plugins and answers for them: which devices there are, who serves them, and why the others do not work."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from importlib.metadata import EntryPoint

from inferplane.plugins.choice import VARIABLE, parse
from inferplane.plugins.hookspecs import API_VERSION, Event, hookimpl
from inferplane.plugins.host import PluginHost
from inferplane.plugins.records import DeviceEntry, LoadedPlugin, Origin, Quarantined

__all__ = [
    "API_VERSION",
    "DeviceEntry",
    "Event",
    "LoadedPlugin",
    "Origin",
    "PluginHost",
    "Quarantined",
    "discover",
    "hookimpl",
    "host",
]


@functools.cache
def host() -> PluginHost:
    """The process's plugin host, built at the first call from installed entry points and `INFERPLANE_PLUGINS`.

    Raises:
        UsageError: `INFERPLANE_PLUGINS` cannot be read.
    """
    return discover(os.environ.get(VARIABLE))


def discover(spec: str | None, entry_points: Iterable[EntryPoint] | None = None) -> PluginHost:
    """A new host.

    Args:
        spec: what `INFERPLANE_PLUGINS` would hold.
        entry_points: looked at instead of the installed ones.

    Raises:
        UsageError: `spec` cannot be read.
    """
    return PluginHost(parse(spec), entry_points)
