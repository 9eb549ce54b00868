"""Prints a plan: the state of the device, then the plan's text in colour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from inferplane.cli.screen import Screen

if TYPE_CHECKING:
    from rich.text import Text

    from inferplane.plugins import DeviceEntry


def show(data: dict[str, Any], entry: DeviceEntry, architectures: list[str], screen: Screen, *, verbose: bool) -> None:
    """Print device and plan on standard output.

    Args:
        data: what `binding.explain` returns.
        entry: the entry of the device.
        architectures: those the backend knows.
        screen: the output.
        verbose: also print the kernels that lost.
    """
    from rich.text import Text

    from inferplane.binding import plan_lines

    screen.show(*_device(entry), "")
    lines = plan_lines(data, screen.out.width, verbose=verbose, architectures=architectures)
    screen.show(*(Text.assemble(*line) for line in lines))


def _device(entry: DeviceEntry) -> Iterator[Text]:
    from rich.text import Text

    probe = entry.probe
    status = probe.presence.value
    style = "bold green" if probe.available else "bold yellow"
    yield Text.assemble((entry.name, "bold"), " is ", (status, style), f" here: {probe.reason}")
    if probe.remedy:
        yield Text.assemble(("to do: ", "bold"), probe.remedy)
