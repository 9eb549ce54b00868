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
        if mode is not None and (not stat.S_ISREG(mode) or str(path.absolute()).startswith(_OPENED)):
            with open(path, "ab") as file:
                file.write(data)
        else:
            _replace(Path(os.path.realpath(path)), data, mode)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{str(path)!r} cannot be written: {error}.", remedy="name a file in a folder of yours"
        ) from error


def _replace(path: Path, data: bytes, mode: int | None) -> None:
    """Put a file in the place of another, or of none."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(partial, "xb") as file:
            if mode is not None:
                partial.chmod(stat.S_IMODE(mode))
            file.write(data)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
