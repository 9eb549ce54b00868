"""Finds plugins and answers for them: which devices there are, who serves them, and why the others do not work."""

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
    """The process's plugin host, built at the first call from installed entry points and `INFERPLANE_PLUGINS`; what of
    that variable has no effect is logged.

    Raises:
        UsageError: `INFERPLANE_PLUGINS` cannot be read.
    """
    spec = os.environ.get(VARIABLE)
    found, listed = discover(spec), parse(spec).modules
    # What somebody typed and nothing came of is told once, whatever he does next; the doctor tells it again.
    for record in found.quarantined():
        if record.entry_point in listed:
            log.warning("%s names a plugin that is left out: %s. To do: %s.", VARIABLE, record, record.remedy)
    for note in found.notes():
        if VARIABLE in note:
            log.warning("%s", note)
    return found


def discover(spec: str | None, entry_points: Iterable[EntryPoint] | None = None) -> PluginHost:
    """A new host.

    Args:
        spec: what `INFERPLANE_PLUGINS` would hold.
        entry_points: looked at instead of the installed ones.

    Raises:
        UsageError: `spec` cannot be read.
    """
    return PluginHost(parse(spec), entry_points)
