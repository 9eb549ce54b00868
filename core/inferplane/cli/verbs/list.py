"""List the models in the cache of huggingface_hub; with --names, the short names.

A model is whole if all is there that running it reads; `inferplane pull NAME` fetches the rest of another one.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from inferplane.cli.arguments import Parser, add_json
from inferplane.cli.screen import Screen
from inferplane.hub.cache import list_repositories
from inferplane.hub.names import display_name, parse_name
from inferplane.hub.progress import format_size
from inferplane.hub.settings import default_cache
from inferplane.hub.short_names import read_short_names, short_names_file

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1


def add_arguments(parser: Parser) -> None:
    """Options of `list`."""
    parser.add_argument("--names", action="store_true", help="the short names, and what they stand for")
    add_json(parser)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Read and print."""
    if args.names:
        names = [asdict(entry) for entry in read_short_names().values()]
        if args.json:
            screen.facts({"schema": SCHEMA, "names": names, "file": str(short_names_file())})
        else:
            screen.show(_names_table(names))
            screen.note(f"{short_names_file()} adds names of yours, as `mine: hf:org/name`")
        return 0
    models = _models()
    if args.json:
        screen.facts({"schema": SCHEMA, "cache": str(default_cache()), "models": models})
    elif models:
        screen.show(_models_table(models))
    else:
        screen.note(f"{default_cache()} holds no model; `inferplane pull NAME` downloads one")
    return 0


def _models() -> list[dict[str, Any]]:
    """One entry for each repository in the cache."""
    short: dict[str, list[str]] = {}
    for entry in read_short_names().values():
        if name := parse_name(entry.model):
            short.setdefault(name.repository, []).append(entry.name)
    out = []
    for repository, cache in list_repositories(default_cache()):
        references = cache.list_references()
        snapshots = [
            {
                "commit": snapshot.commit,
                "revisions": [name for name, commit in references.items() if commit == snapshot.commit],
                "whole": snapshot.is_whole,
                "folder": str(snapshot.folder),
            }
            for snapshot in cache.list_snapshots()
        ]
        names = short.get(repository, [])
        shown = display_name(repository)
        out.append({"model": shown, "short_names": names, "bytes": cache.size(), "snapshots": snapshots})
    return out


def _models_table(models: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("model", "short name", "revision", "commit"):
        table.add_column(column)
    table.add_column("size", justify="right")
    table.add_column("")
    for model in models:
        rows = model["snapshots"] or [{"commit": "", "revisions": [], "whole": False}]
        for at, row in enumerate(rows):
            first = (model["model"], ", ".join(model["short_names"])) if not at else ("", "")
            size = "" if at else format_size(model["bytes"])
            whole = "" if row["whole"] else "not whole"
            table.add_row(*first, ", ".join(row["revisions"]), row["commit"][:12], size, whole)
    return table


def _names_table(names: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("short name", "model", "license", "size"):
        table.add_column(column)
    for entry in names:
        size = f"about {entry['size']}" if entry["size"] and not entry["origin"] else entry["size"]
        table.add_row(entry["name"], entry["model"], entry["license"], size)
    return table
