"""Download a model into DIR/NAME, from where `start_server` takes it.

Takes the flags of the source system's download_model.py, and its names of models as well as those of a hub.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from inferplane.cli.screen import Screen
from inferplane.errors import UsageError
from inferplane.hub import HubSettings, fetch, parse_name
from inferplane.hub.download import disk_error
from inferplane.serving.source_models import DEFAULT_MODEL, SourceModel, find_source_model
from inferplane.source.flags import Flag, parse

HUB = ".hub"
"""Folder of the downloaded files, in the form of a hub's cache, beside the folders of models, which link to them."""
FLAGS = (
    Flag("model_name", "text", DEFAULT_MODEL, "the model: a name of the source system, or of a hub"),
    Flag("dir", "text", "downloads", "where models lie; this one lies in its folder there"),
    Flag("nnodes", "count", 1, "machines that will share the model"),
    Flag("mode", "text", "master", "which of the machines this one is", choices=("master", "slave")),
    Flag("speculate_model_path", "text", None, "where the layers that draft are looked for"),
)


def run(words: Sequence[str], screen: Screen) -> int:
    """Download, and print the folder."""
    args = parse("download_model", FLAGS, words, str(__doc__))
    model = find_source_model(args.model_name) or SourceModel(args.model_name, args.model_name)
    if args.nnodes > 1:
        screen.note(
            f"each rank reads its part of every file, so each of the {args.nnodes} machines downloads all of them"
        )
    elif args.mode != "master":
        raise UsageError("--mode slave without further machines.", remedy="pass --nnodes 2, or leave --mode out")
    if args.speculate_model_path is not None:
        words_of = "layers that draft are among the model's own files"
        screen.note(f"{words_of}: nothing is written to --speculate_model_path {args.speculate_model_path}")
    folder = download(model, Path(args.dir).expanduser(), screen)
    screen.stream(f"{folder}\n")
    return 0


def download(model: SourceModel, place: Path, screen: Screen, check: Callable[[Path], None] | None = None) -> Path:
    """Download a model, or what is missing of it.

    Args:
        model: what to download.
        place: folder of all models.
        screen: shows the progress.
        check: called with the folder when its configs are there, before weights are downloaded; may raise.

    Returns:
        The model's folder, `place/NAME`: its files are links to those in the hub's folder beside it.

    Raises:
        InferplaneError: as `inferplane.hub.fetch`; the folder cannot be written.
    """
    from inferplane.cli.model_loading import fetching

    name = parse_name(model.repository)
    if name is None:
        raise UsageError(f"{model.name!r} is no name of a model on a hub.", remedy="pass a name as ORG/NAME")
    settings = replace(HubSettings.from_environment(), cache=place / HUB)
    with fetching(name, screen) as progress:
        found = fetch(name, settings=settings, progress=progress, check=check)
    folder = place / model.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in found.folder.iterdir():
            _link(file.resolve(), folder / file.name)
    except OSError as error:
        raise disk_error(error, folder) from error
    return folder


def can_write(place: Path) -> bool:
    """Whether models can be downloaded into a folder, which may have to be made."""
    existing = _find_existing(place)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def describe_access(place: Path) -> str:
    """Whose a folder is, or the one in which it would have to be made, and who may write there."""
    existing = _find_existing(place)
    if not existing.is_dir():
        return f"a file, {existing}"
    found = existing.stat()
    return f"the folder {existing} of user {found.st_uid}, mode {found.st_mode & 0o777:o}"


def _find_existing(place: Path) -> Path:
    return next(folder for folder in (place, *place.absolute().parents) if folder.exists())


def _link(file: Path, link: Path) -> None:
    """Make a link to a file, in place of one that is there."""
    if link.is_file() and link.samefile(file):
        return
    made = link.with_name(f"{link.name}.{os.getpid()}")
    try:
        os.link(file, made)
    except OSError:  # a file system without hard links
        made.symlink_to(os.path.relpath(file, link.parent))
    made.replace(link)
