"""Show the settings that `inferplane serve` would use, and where each comes from.

Takes the options of `serve`. The first source that names a setting decides: a flag, a variable INFERPLANE_..., a
variable of the source system (such as MAX_SEQ_LEN), the YAML file, the default. Keys are not shown.
"""

from __future__ import annotations

import argparse

from inferplane.cli.arguments import Parser, add_examples, add_json
from inferplane.cli.screen import Screen
from inferplane.cli.verbs.serve import add_settings, resolve
from inferplane.errors import UsageError

SCHEMA = 1


def add_arguments(parser: Parser) -> None:
    """Options of `config`."""
    parser.usage = f"{parser.prog} show [MODEL] [options of serve]"
    parser.add_argument("what", metavar="show", help="what to do: show")
    parser.add_argument("--set", action="store_true", help="omit settings that have their default")
    add_json(parser)
    add_settings(parser)
    add_examples(parser, "show", "show --config serving.yaml --max-num-seqs 64 --set")


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Resolve and print the settings."""
    if args.what != "show":
        raise UsageError(f"`config` cannot {args.what!r}.", there_is="show")
    resolved = resolve(args)
    origins = {n: o for n, o in resolved.origins.items() if not args.set or o != "default"}
    values = {name: value for name, value in resolved.mask_secrets().items() if name in origins}
    if args.json:
        settings = {name: {"value": value, "origin": origins[name]} for name, value in values.items()}
        screen.facts({"schema": SCHEMA, "settings": settings, "notes": list(resolved.notes)})
        return 0
    for note in resolved.notes:
        screen.warning(note)
    _show(values, origins, screen)
    return 0


def _show(values: dict[str, object], origins: dict[str, str], screen: Screen) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in values.items():
        origin = origins[name]
        table.add_row(name, _words(value), origin, style="dim" if origin == "default" else None)
    screen.show(table)


def _words(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) or "-" if isinstance(value, list) else str(value)
