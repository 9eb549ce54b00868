"""Check this machine: Python, torch, plugins, devices, memory. Each problem comes with its remedy.

The exit code is 1 if something is broken; a device that is absent is no fault.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from inferplane.cli.arguments import Parser, add_json
from inferplane.cli.screen import Screen

if TYPE_CHECKING:
    from inferplane.plugins.doctor import Line

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def add_arguments(parser: Parser) -> None:
    """Options of `doctor`."""
    add_json(parser)
    parser.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="open each available device, which imports its runtime, to see whether it works",
    )


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Check and print."""
    from inferplane.plugins import host
    from inferplane.plugins.doctor import doctor

    report = doctor(host(), open_devices=args.open)
    if args.json:
        screen.facts(report.to_json())
    else:
        _show(merge_lines(report.lines), screen)
    return 1 if report.status == "fail" else 0


def merge_lines(lines: Sequence[Line]) -> list[Line]:
    """Merge neighbours with equal text about one kind of subject: "plugin a" and "plugin b" become "plugins a, b"."""
    from inferplane.plugins.doctor import Line

    out = []
    for _, same in groupby(lines, key=lambda x: (x.subject.partition(" ")[0], x.status, x.detail, x.remedy)):
        group = list(same)
        if len(group) > 1:
            kind = group[0].subject.partition(" ")[0]
            names = ", ".join(line.subject.partition(" ")[2] for line in group)
            out.append(Line(f"{kind}s", group[0].status, f"{names}: {group[0].detail}", group[0].remedy))
        else:
            out.append(group[0])
    return out


def _show(lines: Sequence[Line], screen: Screen) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for line in lines:
        words = Text(line.detail, "dim" if line.status == "warn" else "")
        if line.remedy:
            words.append("\nto do: ", "bold not dim").append(line.remedy, "not dim")
        grid.add_row(Text(line.status, STYLES[line.status], no_wrap=True), Text(line.subject, no_wrap=True), words)
    screen.show(grid)
