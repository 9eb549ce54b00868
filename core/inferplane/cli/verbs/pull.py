"""Download a model, or the newest revision of one that is in the cache; prints the folder.

Only files that are read are downloaded: config, safetensors, tokenizer and chat template, or one GGUF file with its
shards; never pickles. An interrupted download goes on where it was; sizes and hashes are checked.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from inferplane.cli.arguments import PROGRAM, Parser, add_examples, add_json
from inferplane.cli.screen import Screen
from inferplane.errors import CheckpointError, UnsupportedModelError, UsageError
from inferplane.hub import FORMS, SHIPPED_NAMES, HubSettings, ModelName, fetch, near_short_names, parse_name

SCHEMA = 1


def add_arguments(parser: Parser) -> None:
    """Options of `pull`."""
    parser.usage = f"{parser.prog} NAME [options]"
    add_name(parser)
    add_json(parser)
    add_examples(parser, "qwen3:0.6b", "hf:HuggingFaceTB/SmolLM2-135M-Instruct@main", "hf:ORG/NAME-GGUF:Q4_K_M")


def add_name(parser: Parser) -> None:
    """The positional NAME."""
    parser.add_argument(
        "name", metavar="NAME", help="hf:ORG/NAME[@REVISION][:FILE], ORG/NAME, ms:ORG/NAME, or a short name"
    )


def as_name(text: str) -> ModelName:
    """The name of a model.

    Raises:
        UsageError: the text is none.
    """
    name = parse_name(text)
    if name is None:
        if text in SHIPPED_NAMES:
            raise UsageError(
                f"{text!r} ships with Inferplane: there is nothing to fetch, show or remove.",
                remedy=f"use it: {PROGRAM} chat {SHIPPED_NAMES[0]}",
            )
        near = near_short_names(text)
        remedy = f"perhaps {near[0]} was meant" if near else "see `inferplane list --names`"
        raise UsageError(f"{text!r} is no name of a model.", there_is=FORMS, remedy=remedy)
    return name


def _warn(screen: Screen, folder: Path) -> None:
    """Warn of a model that will not run here, before its weights are downloaded."""
    from inferplane.engine.runner.model_files import check_architecture

    try:
        check_architecture(folder)
    except (UnsupportedModelError, CheckpointError) as error:
        screen.warning(error.what)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Download and print."""
    from inferplane.cli.model_loading import fetching

    name = as_name(args.name)
    with fetching(name, screen) as progress:
        found = fetch(name, settings=HubSettings.from_environment(), progress=progress, check=partial(_warn, screen))
    size = sum(path.stat().st_size for path in found.folder.iterdir() if path.is_file())
    if args.json:
        data = {"schema": SCHEMA, "model": args.name, "repository": name.repository, "source": name.source}
        screen.facts({**data, "commit": found.commit, "folder": str(found.path), "bytes": size})
    else:
        screen.stream(f"{found.path}\n")
    return 0
