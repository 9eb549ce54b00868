"""Remove a model from the cache of huggingface_hub: all its revisions, or with NAME@REVISION that one.

Half a download of it is removed too. Files that other revisions share stay.
"""

from __future__ import annotations

import argparse

from inferplane.cli.arguments import Parser, add_json
from inferplane.cli.screen import Screen
from inferplane.cli.verbs.pull import add_name, as_name
from inferplane.errors import UsageError
from inferplane.hub.cache import RepositoryCache, list_repositories
from inferplane.hub.names import MODELSCOPE, display_name
from inferplane.hub.progress import format_size
from inferplane.hub.settings import default_cache

SCHEMA = 1


def add_arguments(parser: Parser) -> None:
    """Options of `rm`."""
    parser.usage = f"{parser.prog} NAME [options]"
    add_name(parser)
    add_json(parser)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Remove and report."""
    name = as_name(args.name)
    if name.source == MODELSCOPE:
        raise UsageError("Models of ModelScope lie in its own cache.", remedy="remove them by `modelscope clear-cache`")
    cache = RepositoryCache(default_cache(), name.repository)
    snapshot = cache.find(name.revision)
    if not cache.folder.is_dir() or (name.revision is not None and snapshot is None):
        there = ", ".join(display_name(repository) for repository, _ in list_repositories(default_cache()))
        raise UsageError(f"{name.full} is not in the cache.", there_is=there or "no model")
    try:
        one = name.revision is not None and snapshot is not None and len(cache.list_snapshots()) > 1
        freed = cache.remove_snapshot(snapshot.commit) if one and snapshot is not None else cache.remove()
    except OSError as error:
        raise UsageError(f"{cache.folder} cannot be removed: {error.strerror}.", remedy="check its owner") from error
    if args.json:
        screen.facts({"schema": SCHEMA, "model": name.full, "bytes": freed})
    else:
        screen.print_remark(f"{name.full}: {format_size(freed)} are free again")
    return 0
