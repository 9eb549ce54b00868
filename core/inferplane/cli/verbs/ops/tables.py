"""Prints ops and kernels as tables in the terminal's width."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from inferplane.cli.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAN_DTYPES = {"float32", "bfloat16", "float16"}
"""A kernel that takes all of them has no dtype requirement."""
UNVERIFIED = "unverified"
NAME_SHARE = 0.28
"""Most of the terminal's width that a column of names takes: longer names wrap, so that the columns behind it fit."""


def show_meanings(ops: list[dict[str, Any]], screen: Screen) -> None:
    """Print every op with its meaning."""
    table = _table(screen, "op", "", wide=("meaning",))
    for op in ops:
        table.add_row(op["op"], _hot(op), op["meaning"].replace("`", ""))
    screen.show(table)


def show_kernels(data: dict[str, Any], screen: Screen) -> None:
    """Print the kernels of one device, op by op."""
    table = _table(screen, "op", "", f"kernels on {data['device']}", "rank", "evidence", wide=("takes only",))
    for op in data["ops"]:
        if not op["kernels"]:
            without = Text("none: its reference runs", "bold red") if op["hot"] else Text("none: its body runs", "dim")
            table.add_row(op["op"], _hot(op), without)
        for i, kernel in enumerate(op["kernels"]):
            first = (op["op"], _hot(op)) if i == 0 else ("", "")
            table.add_row(*first, kernel["kernel"], str(kernel["rank"]), _level(kernel), _only(kernel))
    screen.show(table)


def show_one(op: dict[str, Any], screen: Screen) -> None:
    """Print one op: its docstring, fields, samples, tolerance and kernels."""
    screen.show(
        Text.assemble((op["op"], "bold"), "  ", _hot(op), "  " if op["hot"] else "", (op["source"], "dim"), "\n")
    )
    for line in reflow(op["doc"], screen.out.width):
        screen.show(Text(line))
    facts = Table.grid(padding=(0, 2, 0, 0))
    rows = {
        "fields": ", ".join(op["fields"]),
        "call": ", ".join(op["arguments"]),
        "variants": ", ".join(op["variants"]),
        "tolerance": ", ".join(f"{name} {value:g}" for name, value in op["tolerance"].items()),
        "samples": ", ".join(sample["label"] for sample in op["samples"]) or "none of its own",
    }
    for name, words in rows.items():
        if words:
            facts.add_row(Text(name, "bold", no_wrap=True), words)
    screen.show("", facts, "")
    if not op["kernels"]:
        screen.show(Text("No kernel is declared for it: its body runs.", "dim"))
        return
    devices: dict[tuple[str, int, str, str], list[str]] = {}
    for k in op["kernels"]:
        devices.setdefault((k["kernel"], k["rank"], k["evidence"], _only(k).plain), []).append(k["device"])
    table = _table(screen, "kernel", "rank", "evidence", wide=("takes only", "on"))
    for (kernel, rank, evidence, only), where in devices.items():
        table.add_row(kernel, str(rank), _level({"evidence": evidence}), Text(only, "dim"), ", ".join(where))
    screen.show(table)


def reflow(doc: str, width: int) -> Iterator[str]:
    """Wrap a docstring to another width; each named argument stays on its own line."""
    block: list[str] = []
    lines = doc.splitlines()
    for number, line in enumerate([*lines, ""]):
        indent = len(line) - len(line.lstrip())
        goes_on = block and line.strip() and indent == len(block[0]) - len(block[0].lstrip())
        if goes_on and not re.match(r"\w+: ", line.strip()):
            block.append(line)
            continue
        if block:
            pad = block[0][: len(block[0]) - len(block[0].lstrip())]
            words = " ".join(part.strip() for part in block)
            yield from textwrap.wrap(words, width, initial_indent=pad, subsequent_indent=pad)
        block = [line] if line.strip() else []
        if not line.strip() and number < len(lines):
            yield ""


def _table(screen: Screen, *narrow: str, wide: tuple[str, ...]) -> Table:
    """A table whose `narrow` columns wrap only for names longer than their share, followed by `wide` ones that wrap."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    most = int(NAME_SHARE * screen.out.width)
    for head in narrow:
        if head == "rank":
            table.add_column(head, no_wrap=True, justify="right")
        else:
            table.add_column(head, max_width=most, overflow="fold")
    for head in wide:
        table.add_column(head, overflow="fold")
    return table


def _hot(op: dict[str, Any]) -> Text:
    return Text("hot", "yellow") if op["hot"] else Text("")


def _level(kernel: dict[str, Any]) -> Text:
    return Text(kernel["evidence"] or UNVERIFIED, "green" if kernel["evidence"] else "dim")


def _only(kernel: dict[str, Any]) -> Text:
    words = []
    if kernel["dtypes"] and not set(kernel["dtypes"]) >= PLAN_DTYPES:
        words.append(" or ".join(kernel["dtypes"]))
    if kernel["formats"] != ["plain"]:
        words.append(f"weights {' or '.join(kernel['formats'])}")
    return Text("; ".join([*words, *kernel["needs"]]), "dim")
