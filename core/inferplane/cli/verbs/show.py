"""Show what a name stands for, where the model lies, its commit and its files; or what a folder or a GGUF file holds.

Of a model that is not in the cache, the hub says what a download would bring; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.cli.arguments import Parser, add_json, add_offline
from inferplane.cli.screen import Screen
from inferplane.cli.verbs.pull import add_name, as_name
from inferplane.errors import UsageError
from inferplane.hub import HubSettings, ModelName, find
from inferplane.hub.cache import CachedSnapshot, RepositoryCache
from inferplane.hub.names import HUGGING_FACE, MODELSCOPE, PYPI
from inferplane.hub.packages import find_package
from inferplane.hub.progress import format_size
from inferplane.hub.settings import is_offline

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1


def add_arguments(parser: Parser) -> None:
    """Options of `show`."""
    parser.usage = f"{parser.prog} NAME [options]"
    add_name(parser)
    add_offline(parser)
    add_json(parser)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Look up and print."""
    path = Path(args.name).expanduser()
    data = _describe_file(path) or _describe_folder(path) or _describe_name(args.name, screen)
    if args.json:
        screen.facts({"schema": SCHEMA, **data})
    else:
        screen.show(_table(data))
    return 0


def _describe_name(text: str, screen: Screen) -> dict[str, Any]:
    """What a name stands for."""
    name = as_name(text)
    data: dict[str, Any] = {"model": name.full, "license": name.short.license if name.short else "", "gated": None}
    package = find_package(name) if name.source == PYPI else None
    data |= {"license": package.license} if package is not None else {}
    snapshot = _snapshot(name)
    if snapshot is not None:
        data |= {"commit": snapshot.commit, "folder": str(snapshot.folder), "whole": snapshot.is_whole}
        data |= {"files": snapshot.files(), "architecture": _architecture(snapshot)}
    elif name.source == HUGGING_FACE and not is_offline():
        data |= _ask_hub(name, screen)
    else:
        files = {} if package is None else {package.file: package.size}
        data |= {"commit": "", "folder": None, "whole": False, "files": files, "architecture": ""}
    return data


def _describe_file(path: Path) -> dict[str, Any]:
    """What a GGUF file and its shards hold; empty if the path names none."""
    if not path.exists():
        return {}
    from inferplane.gguf.opened import GGUFModel, find_file

    file = find_file(path)
    if file is None:
        return {}
    model = GGUFModel.open(file)
    paths = {entry.path: entry.path.stat().st_size for entry in model.header.tensors.values()}
    types = Counter(entry.type.name for entry in model.header.tensors.values())
    license = model.header.metadata.get("general.license")
    return {
        "model": str(file),
        "license": license if isinstance(license, str) else "",
        "gated": None,
        "commit": "",
        "folder": str(file.parent),
        "whole": True,
        "files": {path.name: size for path, size in sorted(paths.items())},
        "architecture": str(model.entries["architectures"][0]),
        "types": dict(types.most_common()),
    }


def _describe_folder(path: Path) -> dict[str, Any]:
    """What a model's folder holds, those of an export's ranks included; empty if the path is none.

    Raises:
        UsageError: it is the folder of no model.
    """
    if not path.is_dir():
        return {}
    snapshot = CachedSnapshot(path, "")
    if not snapshot.has_config:
        raise UsageError(
            f"{path} is no folder of a model.",
            there_is="models in folders with a config.json, and GGUF files",
            remedy="name one of these, or a model of a hub (`inferplane list --names`)",
        )
    inner = (file for folder in sorted(path.glob("rank_*")) for file in sorted(folder.iterdir()))
    files = {
        str(file.relative_to(path)): file.stat().st_size for file in (*sorted(path.iterdir()), *inner) if file.is_file()
    }
    found: dict[str, Any] = {"model": str(path), "license": "", "gated": None, "commit": "", "folder": str(path)}
    return {**found, "whole": True, "files": files, "architecture": _architecture(snapshot)}


def _snapshot(name: ModelName) -> CachedSnapshot | None:
    settings = HubSettings.from_environment()
    if name.source != MODELSCOPE:
        return RepositoryCache(settings.cache, name.repository).find(name.revision)
    found = find(name, settings)
    return None if found is None else CachedSnapshot(found.folder, found.commit)


def _ask_hub(name: ModelName, screen: Screen) -> dict[str, Any]:
    """What the hub has under a name."""
    from inferplane.hub.connection import HubConnection
    from inferplane.hub.repository import read_repository

    repository = read_repository(HubConnection(HubSettings.from_environment(), screen.note), name)
    found: dict[str, Any] = {"commit": repository.commit, "folder": None, "whole": False, "gated": repository.gated}
    found |= {"license": repository.license} if repository.license else {}
    return {**found, "files": {file.name: file.size for file in repository.files}, "architecture": ""}


def _architecture(snapshot: CachedSnapshot) -> str:
    """The architecture that the config names; empty without one."""
    import json

    try:
        names = json.loads((snapshot.folder / "config.json").read_bytes())["architectures"]
        return str(names[0])
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        return ""


def _table(data: dict[str, Any]) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")  # a path is shown whole, on several lines if need be
    folder = data["folder"] or "not in the cache"
    whole = "" if data["whole"] or data["folder"] is None else ", not whole (`inferplane pull` fetches the rest)"
    rows = [("model", data["model"]), ("commit", data["commit"]), ("folder", f"{folder}{whole}")]
    rows += [("architecture", data["architecture"]), ("license", data["license"])]
    rows += [("tensors", ", ".join(f"{count} in {kind}" for kind, count in data.get("types", {}).items()))]
    rows += [("access", "gated: the publisher grants it")] if data["gated"] else []
    for what, words in rows:
        if words:
            grid.add_row(what, words)
    grid.add_row("files", format_size(sum(data["files"].values())))
    for name, size in data["files"].items():
        grid.add_row("", f"{name}  {format_size(size)}")
    return grid
