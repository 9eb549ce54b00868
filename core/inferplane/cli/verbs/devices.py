"""List the devices of all plugins: which are here, and for the others what is missing and what to do."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from inferplane.cli.arguments import Parser, add_json
from inferplane.cli.screen import Screen

if TYPE_CHECKING:
    from inferplane.plugins import DeviceEntry, PluginHost
    from inferplane.types import Probe

SCHEMA = 1
STYLES = {"available": "bold green", "absent": "dim", "broken": "bold red"}


def add_arguments(parser: Parser) -> None:
    """Options of `devices`."""
    add_json(parser)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Probe every device without opening it."""
    from inferplane.plugins import host

    if args.json:
        screen.facts(devices_data(host()))
    else:
        _show(host(), screen)
    return 0


def devices_data(host: PluginHost) -> dict[str, Any]:
    """`{schema, devices: [...], quarantined: [...], notes: [...]}`."""
    entries = [_entry_data(entry) for entry in host.devices()]  # first, since probing may quarantine plugins
    quarantined = [asdict(record) for record in host.list_quarantined()]
    return {"schema": SCHEMA, "devices": entries, "quarantined": quarantined, "notes": host.notes()}


def probe_data(probe: Probe) -> dict[str, Any]:
    """`{status, reason, remedy, versions, count}`."""
    return {
        "status": probe.presence.value,
        "reason": probe.reason,
        "remedy": probe.remedy,
        "versions": dict(probe.versions),
        "count": probe.devices,
    }


def _entry_data(entry: DeviceEntry) -> dict[str, Any]:
    names = ("distribution", "version", "in_tree", "variant_of", "torch_device", "auto_rank")
    return {"name": entry.name, **probe_data(entry.probe), **{name: getattr(entry, name) for name in names}}


def _show(host: PluginHost, screen: Screen) -> None:
    from rich.table import Table
    from rich.text import Text

    entries = sorted(host.devices(), key=lambda entry: (not entry.probe.available, entry.name))
    grid = Table.grid(padding=(0, 2, 0, 0))
    common = set.intersection(*(set(entry.probe.versions.items()) for entry in entries)) if entries else set()
    for entry in entries:
        probe, status = entry.probe, entry.probe.presence.value
        words = Text(probe.reason)
        if probe.devices is not None and probe.devices > 1:
            words.append(f" ({probe.devices} of them)")
        own = [f"{name} {version}" for name, version in set(probe.versions.items()) - common]
        words.append(f"  [{'; '.join((f'{entry.distribution} {entry.version}', *sorted(own)))}]", "dim")
        if probe.remedy:
            words.append("\nto do: ", "bold").append(probe.remedy)
        name = Text(entry.name, "bold" if probe.available else "", no_wrap=True)
        grid.add_row(name, Text(status, STYLES[status], no_wrap=True), words)
    screen.show(grid)
    if records := host.list_quarantined():
        screen.show(Text("\nin quarantine", "bold red"))
        grid = Table.grid(padding=(0, 2, 0, 0))
        for record in records:
            words = Text(f"{record.stage}: {record.reason}")
            words.append("\nto do: ", "bold").append(record.remedy)
            words.append(f"\n{record.distribution} {record.version}", "dim")
            if screen.debug and record.traceback:
                words.append(f"\n{record.traceback.rstrip()}", "dim")
            grid.add_row(Text(record.entry_point, no_wrap=True), words)
        screen.show(grid)
    for note in host.notes():
        screen.note(note)
