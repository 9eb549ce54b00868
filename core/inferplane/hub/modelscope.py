"""Models of ModelScope, through the `modelscope` package: its protocol, its cache, its login."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inferplane.errors import DownloadError, InferplaneError, UsageError, install_hint
from inferplane.hub.cache import CachedSnapshot
from inferplane.hub.location import Location
from inferplane.hub.names import ModelName
from inferplane.hub.progress import DownloadProgress, format_size
from inferplane.hub.repository import FILE_NAME, RemoteFile, Repository

DEFAULT_REVISION = "master"


def find(name: ModelName) -> Location | None:
    """The model's folder in ModelScope's cache, if all is there that running it reads; connects to nothing.

    Raises:
        UsageError: the package is missing.
    """
    try:
        folder = Path(_download(name, local_files_only=True))
    except InferplaneError:
        raise
    except Exception:  # the package raises ValueError and others for a model that is not there
        return None
    return Location(folder, "") if CachedSnapshot(folder, "").is_whole else None


def fetch(name: ModelName, progress: DownloadProgress, check: Callable[[Path], None] | None = None) -> Location:
    """Download what the cache lacks of a model; the package shows the progress, checks sizes and hashes, and resumes.
    `check` is called with the folder before weights are downloaded.

    Raises:
        UsageError: the package is missing. CheckpointError: the repository has no weights that are read.
        DownloadError: as the package says.
    """
    try:
        listed = _api().get_model_files(name.repository, revision=name.revision or DEFAULT_REVISION, recursive=False)
        repository = Repository(name, "", tuple(file for entry in listed if (file := _remote_file(entry)) is not None))
        repository.check_kind()
        small = repository.small_files() + [file for file in repository.files if ".safetensors.index" in file.name]
        folder = Path(_download(name, files=small))
        if check is not None:
            check(folder)
        weights = repository.weight_files(lambda file: (folder / file.name).read_bytes())
        total = sum(file.size for file in {*small, *weights})
        progress.say(f"fetching {name.full}: {format_size(total)} from ModelScope to {folder}")
        folder = Path(_download(name, files=[*small, *weights]))
        for file in (*small, *weights):
            if (folder / file.name).stat().st_size != file.size:
                raise DownloadError(f"{file.name} of {name.full} has not the size that ModelScope states.")
    except InferplaneError:
        raise
    except Exception as error:  # requests', and the package's own of several versions
        words = " ".join(str(error).split())[:200]
        raise DownloadError(
            f"ModelScope does not give {name.full}: {type(error).__name__}: {words}.",
            remedy="check the name and the network; private models need `modelscope login`",
        ) from None
    return Location(folder, "")


def _remote_file(entry: dict[str, Any]) -> RemoteFile | None:
    """A file of a list; None for folders, and for what lies in one."""
    name, size = str(entry.get("Path")), entry.get("Size")
    if size is None or FILE_NAME.fullmatch(name) is None:
        return None
    return RemoteFile(name, int(size), "", is_large=False)


def _check_package() -> None:
    """Raise UsageError if the package is not installed."""
    if find_spec("modelscope") is None:
        raise UsageError("Names with ms: need the package modelscope.", remedy=install_hint("modelscope"))


def _api() -> Any:
    _check_package()
    from modelscope.hub.api import HubApi

    return HubApi()


def _download(name: ModelName, files: Sequence[RemoteFile] = (), *, local_files_only: bool = False) -> str:
    _check_package()
    from modelscope.hub.snapshot_download import snapshot_download

    patterns = [file.name for file in files] or None
    return str(
        snapshot_download(
            name.repository,
            revision=name.revision or DEFAULT_REVISION,
            allow_file_pattern=patterns,
            local_files_only=local_files_only,
        )
    )
