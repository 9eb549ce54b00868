"""Serve a model over HTTP: OpenAI's routes, the native dialect on the same ones, health and metrics.

Every option can also be given as a variable (INFERPLANE_MAX_NUM_SEQS for --max-num-seqs) or in a YAML file
(max_num_seqs: 32);
`inferplane config show` shows the settings and where each comes from. Ctrl-C or SIGTERM ends the server once the
running requests are done; a second one ends it at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inferplane.cli.arguments import Parser, add_examples, add_flags, check_device, pins
from inferplane.cli.screen import Screen
from inferplane.engine.clients.options import flags

if TYPE_CHECKING:
    from inferplane.serving.configure import ResolvedSettings


def add_arguments(parser: Parser) -> None:
    """Options of `serve`: one per setting."""
    parser.usage = f"{parser.prog} [MODEL] [options]"
    add_settings(parser)
    add_examples(parser, "", "path/to/model --device {X} --port 8000", "--config serving.yaml --max-num-seqs 64")


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Serve until a signal."""
    resolved = resolve(args)
    from inferplane.serving import logs
    from inferplane.serving.lifecycle.start import run as serve

    if logs.is_json(resolved.settings.log_format):
        screen.log = logs.log_fatal
    return serve(resolved, pins(resolved.settings.op))


def add_settings(parser: Parser) -> None:
    """Add a flag for every server setting; the namespace holds only those in the command."""
    from inferplane.serving.settings import FIELDS

    parser.add_argument("--config", metavar="FILE", help="YAML with settings; left out: INFERPLANE_CONFIG")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, f in FIELDS.items():
        words, metavar = f.metadata["words"], f.metadata.get("metavar")
        if name == "model":
            parser.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=words)
            continue
        section = f.metadata["section"]
        group = groups.setdefault(section, parser.add_argument_group(section))
        kind: dict[str, Any] = {"metavar": metavar, "help": words}
        if f.type == "bool":
            kind = {"action": argparse.BooleanOptionalAction if f.default else "store_true", "help": words}
        elif f.type == "tuple[str, ...]":
            kind["action"] = "append"
        elif f.default not in (None, "auto"):
            kind["help"] = f"{words} ({f.default})"
        add_flags(group, flags(name), dest=name, default=argparse.SUPPRESS, **kind)


def resolve(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> ResolvedSettings:
    """Resolve the settings of a command from flags, variables, file and defaults."""
    from inferplane.serving.configure import resolve as resolve_settings
    from inferplane.serving.settings import FIELDS

    given = {name: value for name, value in vars(args).items() if name in FIELDS}
    resolved = resolve_settings(given, environ, args.config)
    check_device(resolved.settings.device, indexed=True, name=f"device ({resolved.origins['device']})")
    return resolved
