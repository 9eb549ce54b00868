"""Files: what a checkpoint's must be, and files that are there whole or not at all, whatever ends the process."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from inferplane.errors import CheckpointError, UsageError

_OPENED = ("/dev/fd/", "/dev/stdout", "/dev/stderr", "/proc/")
"""Names of what a process has opened; a file behind them may have other writers."""
AGAIN = "fetch the file again"


def file_size(path: Path) -> int:
    """Bytes of a regular file, which a link may lead to.

    Raises:
        CheckpointError: there is none, or it is a directory, a pipe, a device, a link that leads nowhere.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}.", remedy=AGAIN) from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is no regular file.", remedy=AGAIN)
    return found.st_size


def check_writable(path: Path) -> None:
    """Raise UsageError when `write_whole` could not write this file: tried, and nothing stays of it."""
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        if path.exists() and not _may_be_replaced(path, path.stat().st_mode):
            return
        partial = _partial(Path(os.path.realpath(path)))
        partial.touch(exist_ok=False)
        partial.unlink()
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file whole, UTF-8, or leave what was there. A link is followed; a file keeps its mode.

    What is no regular file, as a pipe or a device, is written to as it is.

    Raises:
        UsageError: it cannot be written.
    """
    try:
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


def _may_be_replaced(path: Path, mode: int) -> bool:
    return stat.S_ISREG(mode) and not str(path.absolute()).startswith(_OPENED)


def _unwritable(path: Path, error: Exception | str) -> UsageError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else error  # it would name the partial file
    return UsageError(f"{str(path)!r} cannot be written: {why}.", remedy="name a file in a folder of yours")


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _replace(path: Path, data: bytes, mode: int | None) -> None:
    """Put a file in the place of another, or of none."""
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
