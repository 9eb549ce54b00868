"""Finds a model by its name in the cache, and downloads what is missing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from inferplane.errors import CapacityError, DownloadError, UsageError, first_of
from inferplane.hub.cache import INCOMPLETE, CachedSnapshot, RepositoryCache, list_repositories
from inferplane.hub.connection import HubConnection
from inferplane.hub.download import disk_error, download
from inferplane.hub.headers import FindRanges, GetBytes, read_gguf, read_safetensors, write_pieces
from inferplane.hub.location import Location
from inferplane.hub.memory import explain_memory, memory_bytes
from inferplane.hub.names import MODELSCOPE, PYPI, ModelName, display_name, near_short_names
from inferplane.hub.progress import SILENT, DownloadProgress, format_size, report_on_stderr
from inferplane.hub.repository import (
    CONFIGS,
    PARAMS,
    SUFFIX,
    RemoteFile,
    Repository,
    no_gguf,
    read_repository,
    refusal,
    weight_bytes,
)
from inferplane.hub.settings import HubSettings

SPARE_BYTES = 64 * 2**20
"""Bytes of the disk that a download leaves free."""


def find(name: ModelName, settings: HubSettings | None = None) -> Location | None:
    """The model's folder in the cache, if all is there that running it reads; connects to nothing."""
    if name.source == MODELSCOPE:
        from inferplane.hub import modelscope

        return modelscope.find(name)
    settings = settings or HubSettings.from_environment()
    if name.source == PYPI:
        from inferplane.hub import packages

        return packages.find(name, settings)
    snapshot = RepositoryCache(settings.cache, name.repository).find(name.revision)
    if snapshot is None:
        return None
    if name.part is not None or not snapshot.has_config:
        file = snapshot.find_gguf(name)
        return None if file is None else Location(snapshot.folder, snapshot.commit, file)
    return Location(snapshot.folder, snapshot.commit) if snapshot.is_whole else None


def locate(
    name: ModelName,
    *,
    configs: bool = False,
    settings: HubSettings | None = None,
    progress: DownloadProgress | None = None,
    check: Callable[[Path], None] | None = None,
    find_ranges: FindRanges | None = None,
) -> Location:
    """The model's folder: in the cache if it is there, without a look at the hub; else downloaded.

    Args:
        name: the model's.
        configs: only its config is read.
        settings: the hub; None: that of the environment.
        progress: what to report to; None: standard error.
        check: called with the folder when its configs are there, or with a GGUF file that has its header alone, before
            weights are downloaded; may raise.
        find_ranges: what is read of a GGUF file for `check`; None: such files are not checked.

    Raises:
        InferplaneError: as `fetch`.
    """
    settings = settings or HubSettings.from_environment()
    if found := find(name, settings):
        return found
    if name.source != MODELSCOPE:
        snapshot = RepositoryCache(settings.cache, name.repository).find(name.revision)
        # Without a tokenizer a model runs on token ids; whether the repository has one only the hub knows.
        has_config = snapshot is not None and snapshot.has_config and name.part is None
        if snapshot is not None and has_config and (configs or (settings.offline and snapshot.has_weights)):
            return Location(snapshot.folder, snapshot.commit)
    return fetch(name, configs=configs, settings=settings, progress=progress, check=check, find_ranges=find_ranges)


def fetch(
    name: ModelName,
    *,
    configs: bool = False,
    settings: HubSettings | None = None,
    progress: DownloadProgress | None = None,
    check: Callable[[Path], None] | None = None,
    find_ranges: FindRanges | None = None,
) -> Location:
    """Download what the cache lacks of the newest commit of a model's revision.

    Args:
        name: the model's.
        configs: download only configs.
        settings: the hub; None: that of the environment.
        progress: what to report to; None: standard error.
        check: called with the folder when its configs are there, or with a GGUF file that has its header alone, before
            weights are downloaded; may raise.
        find_ranges: what is read of a GGUF file for `check`; None: such files are not checked.

    Raises:
        UsageError: there is no such repository or revision, downloads are off, or its format is not read.
        DownloadError: the hub cannot be reached or refuses.
        CapacityError: the disk is too small.
        CheckpointError: the repository has no weights that are read, or a file does not have its hash.
    """
    settings = settings or HubSettings.from_environment()
    if name.part is not None and name.source == MODELSCOPE:
        raise no_gguf(name)
    if settings.offline:
        raise _not_in_cache(name, settings)
    if progress is None:
        with report_on_stderr() as progress:
            return fetch(
                name, configs=configs, settings=settings, progress=progress, check=check, find_ranges=find_ranges
            )
    if name.source == MODELSCOPE:
        from inferplane.hub import modelscope

        return modelscope.fetch(name, progress, check)
    if name.source == PYPI:
        from inferplane.hub import packages

        return packages.fetch(name, settings, progress)
    return _Fetch(name, settings, progress, find_ranges).run(configs=configs, check=check)


def fetch_headers(
    name: ModelName,
    folder: Path,
    find_ranges: FindRanges,
    settings: HubSettings | None = None,
    progress: DownloadProgress = SILENT,
) -> Path:
    """Fill a folder with what a plan reads of a model of Hugging Face: its configs, and its weights' files with their
    headers alone. The files have their sizes, but no tensor's bytes: where the file system can, they take no space.

    Args:
        name: the model's.
        folder: is empty.
        find_ranges: what is read of GGUF files.
        settings: the hub; None: that of the environment.
        progress: what to report to.

    Returns:
        The folder, or the GGUF file in it.

    Raises:
        InferplaneError: as `fetch`.
    """
    return _Fetch(name, settings or HubSettings.from_environment(), progress, find_ranges).copy_headers(folder)


class _Fetch:
    """One download of a repository of Hugging Face."""

    def __init__(
        self, name: ModelName, settings: HubSettings, progress: DownloadProgress, find_ranges: FindRanges | None
    ) -> None:
        self.name, self.settings, self.progress, self.find_ranges = name, settings, progress, find_ranges
        self.connection = HubConnection(settings, progress.say)
        self.cache = RepositoryCache(settings.cache, name.repository)

    def copy_headers(self, folder: Path) -> Path:
        """See `fetch_headers`."""
        self.repository.check_kind()
        if self.repository.is_gguf and self.find_ranges is not None:
            return self._copy_gguf_headers(folder, self.find_ranges)
        configs = self.run(configs=True, check=None).folder
        for path in configs.iterdir():
            if path.name in (*CONFIGS, PARAMS):
                shutil.copyfile(path, folder / path.name)
        files = self.repository.weight_files(lambda file: self._read(self.repository, file))
        for file in files:
            path = folder / file.name
            if not file.name.endswith(SUFFIX):
                path.write_bytes((self.cache.blobs / file.digest).read_bytes())
                continue
            write_pieces(path, file.size, read_safetensors(self._reader_of(file), file.size))
        return folder

    def _copy_gguf_headers(self, folder: Path, find_ranges: FindRanges) -> Path:
        files = self.repository.gguf_files()
        for file in files:
            write_pieces(folder / file.name, file.size, read_gguf(self._reader_of(file), file.size, find_ranges))
        return folder / files[0].name

    def _reader_of(self, file: RemoteFile) -> GetBytes:
        """Reads bytes of a file."""
        url = self._url(self.repository, file)
        return lambda first, count: self.connection.get_bytes(url, first, count, self._refuse)

    @cached_property
    def repository(self) -> Repository:
        """What the hub has; see `_read_repository`."""
        return self._read_repository()

    def run(self, *, configs: bool, check: Callable[[Path], None] | None) -> Location:
        """Download all, or only configs; see `fetch`."""
        repository = self.repository
        repository.check_kind()
        folder = self.cache.snapshots / repository.commit
        if repository.is_gguf:
            return self._run_gguf(repository, folder, check)
        if check is not None and not configs and not CachedSnapshot(folder, repository.commit).has_weights:
            self._check_disk(repository.configs())
            self._download_all(repository, repository.configs(), SILENT)
            check(folder)
        files = repository.configs() if configs else repository.small_files()
        if not configs:
            files += repository.weight_files(lambda file: self._read(repository, file))
        self._check_disk(files)
        missing = self._missing_bytes(files)
        if missing and not configs:
            self._announce(repository, files, missing)
        self._download_shown(repository, files)
        if not configs or self.cache.find(self.name.revision) is None:  # configs replace no whole snapshot
            self._write_reference(repository.commit)
        return Location(folder, repository.commit)

    def _run_gguf(self, repository: Repository, folder: Path, check: Callable[[Path], None] | None) -> Location:
        """Download a GGUF file, or all its shards: it has its config and tokenizer inside."""
        files = repository.gguf_files()
        if check is not None and self.find_ranges is not None and self._missing_bytes(files):
            with tempfile.TemporaryDirectory(prefix="inferplane-") as headers:
                check(self._copy_gguf_headers(Path(headers), self.find_ranges))
        self._check_disk(files)
        if missing := self._missing_bytes(files):
            self._announce(repository, files, missing)
        self._download_shown(repository, files)
        self._write_reference(repository.commit)
        return Location(folder, repository.commit, files[0].name)

    def _write_reference(self, commit: str) -> None:
        """Note which commit the name's revision has."""
        try:
            self.cache.write_reference(self.name.revision, commit)
        except OSError as error:
            raise disk_error(error, self.cache.folder) from error

    def _download_shown(self, repository: Repository, files: Sequence[RemoteFile]) -> None:
        """Download files with progress; an error says how far the download is."""
        try:
            self._download_all(repository, files, self.progress)
        except DownloadError as error:
            raise self._add_progress(error, files) from error

    def _download_all(self, repository: Repository, files: Sequence[RemoteFile], progress: DownloadProgress) -> None:
        """Download files, and give them their names when all are there: what finds weights finds all of them."""
        total, done = sum(file.size for file in files), 0
        try:
            for file in files:
                self._download(repository, file, partial(_report_bytes, progress, done, total))
                done += file.size
            for file in files:
                self.cache.link(repository.commit, file.name, file.digest)
        except OSError as error:
            raise disk_error(error, self.cache.folder) from error

    def _read_repository(self) -> Repository:
        """What the repository holds. An error about the network says what there is without it, and that a plain name
        may have been a folder's.
        """
        try:
            return read_repository(self.connection, self.name)
        except DownloadError as error:
            what, there_is = error.what, error.there_is
            if not self.connection.has_answered:
                there_is = _describe_cache(self.settings)
                if half := self.cache.size():
                    there_is += f"; {format_size(half)} of {self.name.repository}, which `--offline` cannot run"
            if self.name.text.startswith(self.name.repository):
                what = f"{self.name.text!r} is no folder, and is looked up on a hub: {what}"
            raise DownloadError(what, there_is=there_is, remedy=error.remedy) from error

    def _add_progress(self, error: DownloadError, files: Sequence[RemoteFile]) -> DownloadError:
        """The error with how far the download was, and how it goes on."""
        total = sum(file.size for file in files)
        have = total - self._missing_bytes(files)
        if not have:
            return error
        there_is = f"{format_size(have)} of {format_size(total)} ({have * 100 // total} %) in {self.cache.folder}"
        remedy = f"{error.remedy}; the same command goes on from there"
        return DownloadError(error.what, there_is=there_is, remedy=remedy)

    def _announce(self, repository: Repository, files: Sequence[RemoteFile], missing: int) -> None:
        """Say what is downloaded, how large it is and where it goes; and if it is too large for this machine."""
        total = sum(file.size for file in files)
        part = f" ({format_size(total - missing)} are there)" if missing < total else ""
        self.progress.say(
            f"fetching {self.name.full} at {repository.commit[:12]}: {format_size(total)}{part} "
            f"from {self.settings.endpoint} to {self.cache.folder}"
        )
        if words := explain_memory(weight_bytes(files), memory_bytes(), self.name.text):
            self.progress.say(words)

    def _download(self, repository: Repository, file: RemoteFile, count: Callable[[int], None]) -> None:
        download(self.connection, self.cache, file, self._url(repository, file), self._refuse, count)

    def _url(self, repository: Repository, file: RemoteFile) -> str:
        """The address of a file."""
        return f"{self.settings.endpoint}/{self.name.repository}/resolve/{repository.commit}/{quote(file.name)}"

    def _refuse(self, response: Any) -> UsageError | DownloadError:
        """The error for a response that is no success."""
        return refusal(response, self.name, self.connection)

    def _read(self, repository: Repository, file: RemoteFile) -> bytes:
        """The content of a small file, which is then in the cache."""
        self._check_disk([file])
        try:
            self._download(repository, file, lambda have: None)
            return (self.cache.blobs / file.digest).read_bytes()
        except OSError as error:
            raise disk_error(error, self.cache.folder) from error

    def _missing_bytes(self, files: Sequence[RemoteFile]) -> int:
        """Bytes that are not in the cache, half a download aside."""
        missing = 0
        for file in files:
            final = self.cache.blobs / file.digest
            partial = final.with_name(f"{file.digest}{INCOMPLETE}")
            have = next((p.stat().st_size for p in (final, partial) if p.is_file()), 0)
            missing += max(0, file.size - have)
        return missing

    def _check_disk(self, files: Sequence[RemoteFile]) -> None:
        """Raise CapacityError if the disk is too small for what is missing."""
        missing = self._missing_bytes(files)
        try:
            self.cache.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.cache.folder).free
        except OSError as error:
            raise disk_error(error, self.settings.cache) from error
        if missing and missing + SPARE_BYTES > free:
            raise CapacityError(
                f"{self.name.full} needs {format_size(missing)} more, and {self.settings.cache} has "
                f"{format_size(free)} free.",
                remedy="free space (`inferplane list`, `inferplane rm NAME`), or set HF_HOME to another disk",
            )


def _report_bytes(progress: DownloadProgress, before: int, total: int, have: int) -> None:
    """Report the bytes of one file, which come after those of other files."""
    progress.count(before + have, total)


def _not_in_cache(name: ModelName, settings: HubSettings) -> UsageError:
    """The error for a model that would have to be downloaded while that is off."""
    near = near_short_names(name.text)
    known = f" Short names: {', '.join(near)}." if near and name.short is None else ""
    there_is, goes_on = _describe_cache(settings) if name.source != MODELSCOPE else "", ""
    if name.source != MODELSCOPE and (half := RepositoryCache(settings.cache, name.repository).size()):
        there_is, goes_on = f"{format_size(half)} of it; {there_is}", ", which goes on from there"
    return UsageError(
        f"Model {name.text!r} is no folder, and not whole in the cache; downloads are off.{known}",
        there_is=there_is,
        remedy=f"without --offline and HF_HUB_OFFLINE: `inferplane pull {name.text}`{goes_on}",
    )


def _describe_cache(settings: HubSettings) -> str:
    """Which models are whole in the cache, for an error."""
    found = [
        display_name(name)
        for name, cache in list_repositories(settings.cache)
        if any(snapshot.is_whole for snapshot in cache.list_snapshots())
    ]
    return f"in {settings.cache}: {first_of(found) if found else 'no model'}"
