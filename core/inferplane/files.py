"""Checks of checkpoint files, and atomic writes: a file is complete or absent, however the process ends."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from inferplane.errors import CheckpointError, UsageError

_OPENED = ("/dev/fd/", "/dev/stdout", "/dev/stderr", "/proc/")
"""Names of files that a process has opened; they may have other writers."""
AGAIN = "fetch the file again"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of errors that say that a disk, or a user's part of it, is full."""


def file_size(path: Path) -> int:
    """Return the size of a regular file in bytes; links are followed.

    Raises:
        CheckpointError: the file does not exist, or it is a directory, a pipe, a device or a broken link.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}.", remedy=AGAIN) from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is not a regular file.", remedy=AGAIN)
    return found.st_size


def check_writable(path: Path) -> None:
    """Raise UsageError if `write_atomically` cannot write this file. It tries, and removes what it wrote."""
    try:
        _check_link(path)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        if path.exists() and not _may_be_replaced(path, path.stat().st_mode):
            return
        partial = _partial(Path(os.path.realpath(path)))
        partial.touch(exist_ok=False)
        partial.unlink()
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically: after a failure the old file is unchanged; the mode stays. Links are followed, but
    not those of other users, who may want a file of this user's changed.

    Pipes, devices and other irregular files are written directly.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        _check_link(path)
        data = text.encode()
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            mode = None
        if mode is not None and not _may_be_replaced(path, mode):
            with open(path, "ab") as file:
                file.write(data)
        else:
            _replace(Path(os.path.realpath(path)), data, mode)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def _check_link(path: Path) -> None:
    if path.is_symlink() and path.lstat().st_uid not in (0, os.geteuid()):
        raise PermissionError(f"it is a link that another user has made, to {os.path.realpath(path)}")


def _may_be_replaced(path: Path, mode: int) -> bool:
    return stat.S_ISREG(mode) and not str(path.absolute()).startswith(_OPENED)


def _unwritable(path: Path, error: Exception | str) -> UsageError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else error  # str() names the partial file
    return UsageError(f"{str(path)!r} cannot be written: {why}.", remedy="name a file in a folder of yours")


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _replace(path: Path, data: bytes, mode: int | None) -> None:
    """Create or replace a file."""
    partial = _partial(path)
    try:
        with open(partial, "xb") as file:
            if mode is not None:
                partial.chmod(stat.S_IMODE(mode))
            file.write(data)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
