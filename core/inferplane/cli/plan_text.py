"""A plan for eyes: the tree of sites, what runs each, and why, in the terminal's width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inferplane.cli.screen import MIB, Screen
from inferplane.ops import OPS
from inferplane.types import RANK_PORTABLE, RANK_TUNED

if TYPE_CHECKING:
    from rich.text import Text

    from inferplane.plugins import DeviceEntry

GAP = "  "
NARROWEST_WHY = 16
INDENT = 2


@dataclass(frozen=True)
class Row:
    """One site of a plan: its last name, its depth in the tree, and its entry in the plan's data."""

    label: str
    depth: int
    entry: dict[str, Any]

    @property
    def alike(self) -> tuple[Any, ...]:
        """Equal for rows that say the same of two step kinds."""
        e = self.entry
        return self.label, self.depth, e["op"], str(e["chosen"]), str(e["rejected"])

    @property
    def troubled(self) -> bool:
        """A hot op without a kernel, or kernels of equal rank."""
        chosen = self.entry["chosen"]
        return bool(chosen["ambiguous"]) or (OPS[self.entry["op"]].hot and chosen["provider"] == "core")


def show(data: dict[str, Any], entry: DeviceEntry, architectures: list[str], screen: Screen, *, verbose: bool) -> None:
    """Print all of it on standard output.

    Args:
        data: what `binding.explain` returns.
        entry: the device's.
        architectures: those the backend knows.
        screen: where.
        verbose: also the losers.
    """
    from rich.text import Text

    screen.show(*_head(data, entry, architectures))
    kinds = list(dict.fromkeys(site["step_kind"] for site in data["sites"]))
    columns = {kind: list(rows([site for site in data["sites"] if site["step_kind"] == kind])) for kind in kinds}
    shown: dict[str, list[Row]] = {}
    for kind in kinds:
        same = next((k for k, r in shown.items() if [x.alike for x in r] == [x.alike for x in columns[kind]]), None)
        if same is None:
            shown[kind] = columns[kind]
        else:
            shown[f"{same}, {kind}"] = shown.pop(same)
    width = screen.out.width
    for kind, lines in shown.items():
        screen.show("", Text(f"steps: {kind}", "bold"), *_table(lines, width, verbose=verbose))
    screen.show("", *_foot(data, [row for lines in shown.values() for row in lines]))


def rows(sites: list[dict[str, Any]]) -> Iterator[Row]:
    """Sites of one step kind, parents before children, with their place in the tree."""
    above: list[str] = []
    for entry in sites:
        site = entry["site"]
        while above and not (above[-1] == "" or site.startswith(f"{above[-1]}.")):
            above.pop()
        parent = above[-1] if above else ""
        label = site[len(parent) + 1 :] if parent else site
        yield Row(label or "model", len(above), entry)
        above.append(site)


def _head(data: dict[str, Any], entry: DeviceEntry, architectures: list[str]) -> Iterator[Text]:
    from rich.text import Text

    probe = entry.probe
    status = probe.presence.value
    style = "bold green" if probe.available else "bold yellow"
    yield Text.assemble((entry.name, "bold"), " is ", (status, style), f" here: {probe.reason}")
    if probe.remedy:
        yield Text.assemble(("to do: ", "bold"), probe.remedy)
    arch = f" for {data['arch']}" if data["arch"] else ""
    others = [name for name in architectures if name != data["arch"]]
    also = f"; --arch takes also {', '.join(others)}" if others else ""
    layouts = ", ".join(sorted({layout["layout"] for layout in data["kv_layouts"]}))
    yield Text("")
    yield Text.assemble((data["model"] or "model", "bold"), f" in {data['dtype']}, planned{arch} (assumed{also})")
    size = data["weight_bytes"] / MIB
    words = f"{size:,.1f} MiB" if size < 10 * 1024 else f"{size / 1024:,.1f} GiB"
    yield Text(f"weights {words}, KV layout {layouts}{_windows(data)}")


def _windows(data: Mapping[str, Any]) -> str:
    """What the cache keeps where layers attend to a window."""
    windows = {layout["window"] for layout in data["kv_layouts"]}
    if windows == {None}:
        return ""
    if None not in windows:
        return f"; blocks before the last {max(windows)} tokens are given back"
    some = ", ".join(map(str, sorted(windows - {None})))
    return f"; all tokens are kept, also by layers with a window of {some}, since others have none"


def _table(lines: list[Row], width: int, *, verbose: bool) -> Iterator[Text]:
    from rich.text import Text

    labels = [" " * INDENT * row.depth + row.label for row in lines]
    columns = [labels, [row.entry["op"] for row in lines], [_by(row) for row in lines]]
    heads = ("site", "op", "runs by")
    widths = [max(map(len, (head, *cells))) for head, cells in zip(heads, columns)]
    start = 2 + sum(widths) + len(GAP) * len(widths)
    room = max(NARROWEST_WHY, width - start)
    yield Text("  " + GAP.join(f"{head:<{w}}" for head, w in zip((*heads, "why"), (*widths, 0))), "dim")
    for row, *cells in zip(lines, *columns):
        label, op, by = (f"{cell:<{w}}" for cell, w in zip(cells, widths))
        why = textwrap.wrap(_why(row), room) or [""]
        mark = ("! ", "bold red") if row.troubled else ("  ", "")
        why_style = "bold red" if row.troubled else "dim"
        yield Text.assemble(mark, label, GAP, (op, "dim"), GAP, (by, _style(row)), GAP, (why[0], why_style))
        for more in why[1:]:
            yield Text(" " * start + more, why_style)
        if verbose:
            pad = " " * (4 + INDENT * (row.depth + 1))
            for loser in row.entry["rejected"]:
                words = f"not {loser['kernel']} (rank {loser['rank']}): {loser['reason']}"
                yield from (
                    Text(x, "yellow")
                    for x in textwrap.wrap(words, width, initial_indent=pad, subsequent_indent=f"{pad}  ")
                )


def _why(row: Row) -> str:
    """The reason; none for what no kernel was ever declared for."""
    chosen = row.entry["chosen"]
    silent = chosen["kernel"] == "decomposition" and chosen["why"].startswith("no kernel") and not row.entry["rejected"]
    return "" if silent and not row.troubled else str(chosen["why"])


def _by(row: Row) -> str:
    kernel = str(row.entry["chosen"]["kernel"])
    return kernel.replace("decomposition", "its parts")


def _style(row: Row) -> str:
    chosen = row.entry["chosen"]
    if row.troubled:
        return "bold red"
    if chosen["provider"] == "core":
        return "dim"
    return "green" if chosen["rank"] >= RANK_TUNED else "cyan" if chosen["rank"] >= RANK_PORTABLE else ""


def _foot(data: dict[str, Any], lines: list[Row]) -> Iterator[Text]:
    from rich.text import Text

    from inferplane.engine import recorded_text

    for copy in data["copies"]:
        packings = ", ".join(copy["packings"])
        yield Text(
            f"kept twice: {copy['weight']} ({copy['uses']} such, packings {packings}), {copy['extra_bytes']} bytes more"
        )
    for item in data["expanded"]:
        words = f"expanded at load: {item['weights']} weights of format {item['format']}"
        yield Text(f"{words}, which no kernel of {item['op']} here takes")
    for item in data["uncoded"]:
        words = f"activations not coded in {item['act']}, as the checkpoint asks, at {item['sites']} sites"
        yield Text(f"{words}: {item['reason']}")
    if not data["decode_steps"]["off"]:
        yield Text(recorded_text(data["decode_steps"]))
    slow = sorted({row.entry["op"] for row in lines if row.troubled and not row.entry["chosen"]["ambiguous"]})
    tied = sorted({row.entry["op"] for row in lines if row.entry["chosen"]["ambiguous"]})
    if slow:
        yield Text(f"hot ops on their slow reference: {', '.join(slow)}; --verbose tells why", "bold red")
    if tied:
        yield Text(f"kernels of equal rank: {', '.join(tied)}; pin one by --op", "bold red")
    if not slow and not tied:
        yield Text("every hot op has a kernel", "green")
