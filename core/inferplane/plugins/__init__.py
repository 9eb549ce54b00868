"""Finds plugins and reports which devices exist, which plugin serves each, and why other plugins do not work."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from importlib.metadata import EntryPoint

from inferplane.plugins.hookspecs import API_VERSION, Event, hookimpl
from inferplane.plugins.host import PluginHost
from inferplane.plugins.records import DeviceEntry, LoadedPlugin, Origin, Quarantined
from inferplane.plugins.selection import VARIABLE, parse

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

log = logging.getLogger("inferplane")


@functools.cache
def host() -> PluginHost:
    """Return the process's plugin host. The first call builds it from installed entry points and `INFERPLANE_PLUGINS`,
    and logs each item of that variable that has no effect.

    Raises:
        UsageError: `INFERPLANE_PLUGINS` cannot be read.
    """
    spec = os.environ.get(VARIABLE)
    found, listed = discover(spec), parse(spec).modules
    # Report an item without effect once per process; `inferplane doctor` reports it too.
    for record in found.list_quarantined():
        if record.entry_point in listed:
            log.warning("%s names a plugin that is quarantined: %s. To do: %s.", VARIABLE, record, record.remedy)
    for note in found.notes():
        if VARIABLE in note:
            log.warning("%s", note)
    return found


def discover(spec: str | None, entry_points: Iterable[EntryPoint] | None = None) -> PluginHost:
    """Build a new host.

    Args:
        spec: a value of `INFERPLANE_PLUGINS`.
        entry_points: used instead of the installed ones.

    Raises:
        UsageError: `spec` cannot be read.
    """
    return PluginHost(parse(spec), entry_points)
