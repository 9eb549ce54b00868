"""Downloads one file into the cache: goes on with what is there, checks size and hash, and then gives it its name.

huggingface_hub 2 begins anew after an interruption, and checks no hash of what HTTP brings; so this does.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from inferplane.errors import CapacityError, CheckpointError, DownloadError
from inferplane.files import FULL
from inferplane.hub.cache import INCOMPLETE, RepositoryCache
from inferplane.hub.connection import HubConnection
from inferplane.hub.repository import RemoteFile

CHUNK_BYTES = 2**20
PATIENCE_S = 0.5
"""Seconds after which a wait for another process is worth a remark."""


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def download(
    connection: HubConnection,
    cache: RepositoryCache,
    file: RemoteFile,
    url: str,
    refuse: Callable[[Any], Exception],
    count: Callable[[int], None],
) -> None:
    """Download a file to `blobs/DIGEST`, unless it is there. Of several processes one downloads, and the others wait.

    Args:
        connection: the way to the hub.
        cache: of the repository.
        file: what to download.
        url: its address.
        refuse: makes the error for a response that is no success.
        count: takes the bytes of the file that are there.

    Raises:
        CapacityError: the disk is full. CheckpointError: size or hash are wrong.
        DownloadError: the hub refuses, or cannot be reached.
    """
    final = cache.blobs / file.digest
    if final.is_file() and final.stat().st_size == file.size:
        return count(file.size)
    cache.blobs.mkdir(parents=True, exist_ok=True)
    cache.locks.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f"{file.digest}{INCOMPLETE}")
    with hold_lock(cache.locks / f"{file.digest}.lock", lambda: connection.say(f"another process fetches {file.name}")):
        if final.is_file() and final.stat().st_size == file.size:  # another process has downloaded it meanwhile
            return count(file.size)
        try:
            resumed = partial.is_file() and partial.stat().st_size > 0
            right = _receive(connection, file, partial, url, refuse, count)
            if not right and resumed:  # what was there before may have been damaged
                right = _receive(connection, file, partial, url, refuse, count)
            if not right:
                raise CheckpointError(
                    f"{file.name} has another hash than the hub states: it is damaged, or was changed on its way.",
                    remedy="try again; if it stays so, check HF_ENDPOINT and proxies",
                )
            partial.replace(final)
        except OSError as error:
            raise disk_error(error, partial.parent) from error


def disk_error(error: OSError, folder: Path) -> CapacityError | DownloadError:
    """The error for a file that cannot be written."""
    if error.errno in FULL:
        what = f"The disk of {folder} is full."
        return CapacityError(what, remedy="free space, or set HF_HOME to another disk; what has arrived is used again")
    return DownloadError(
        f"{folder} cannot be written: {error.strerror or error}.", remedy="set HF_HOME to a folder of yours"
    )


@contextlib.contextmanager
def hold_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock that huggingface_hub takes for this file too; `on_wait` is called if another process has it."""
    from filelock import Timeout
    from huggingface_hub import utils

    lock: Any = utils.WeakFileLock  # type: ignore[attr-defined]  # exported, but not in the way that mypy demands
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock(path, timeout=PATIENCE_S))
        except Timeout:
            on_wait()
            held.enter_context(lock(path))
        yield


def _receive(
    connection: HubConnection,
    file: RemoteFile,
    partial: Path,
    url: str,
    refuse: Callable[[Any], Exception],
    count: Callable[[int], None],
) -> bool:
    """Append to the partial file until it has the file's size; whether its hash is right. A wrong one is removed."""
    with partial.open("ab+") as out:
        digest = _hash_of(file)
        best = have = _read_again(out, file, digest)
        while have < file.size:
            count(have)
            failure: Exception = EOFError("the answer was too short")
            headers = {"range": f"bytes={have}-"} if have else {}
            with connection.get(url, headers) as response:
                if response.status_code >= 300 and not (have and response.status_code == 416):
                    raise refuse(response)
                if have and not _continues(response, have):
                    out.truncate(0)
                    have, digest = 0, _hash_of(file)
                    if response.status_code != 200:
                        continue
                try:  # pieces as they come: a size of pieces would lose the last one of an interrupted answer
                    for chunk in response.iter_raw():
                        have += len(chunk)
                        if have > file.size:
                            break
                        out.write(chunk)
                        digest.update(chunk)
                        if have > best:  # a server that begins anew each time makes no progress
                            best = have
                            connection.note_bytes()
                        count(have)
                except connection.interruptions as error:
                    failure = error
                out.flush()
            if have > file.size:
                out.truncate(0)
                raise CheckpointError(
                    f"{file.name} has more bytes than the {file.size} that the hub states.", remedy="try again"
                )
            if have < file.size:
                connection.pause_after(failure)
    if digest.hexdigest() == file.digest:
        return True
    partial.unlink()
    return False


def _continues(response: Any, have: int) -> bool:
    """Whether a response has the bytes from an offset on."""
    given = str(response.headers.get("content-range", ""))
    return response.status_code == 206 and given.startswith(f"bytes {have}-")


def _hash_of(file: RemoteFile) -> _Hash:
    """The hash by which the hub knows a file: SHA-256, or git's SHA-1 of what it calls a blob."""
    if file.is_large:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _read_again(out: BinaryIO, file: RemoteFile, digest: _Hash) -> int:
    """Hash what an earlier download has left; returns its bytes, 0 if there are too many."""
    out.seek(0, 2)
    have = out.tell()
    if have > file.size:
        out.truncate(0)
        return 0
    out.seek(0)
    left = have
    while left:
        chunk = out.read(min(CHUNK_BYTES, left))
        digest.update(chunk)
        left -= len(chunk)
    out.seek(0, 2)
    return have
