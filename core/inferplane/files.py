"""Files that are there whole or not at all, whatever ends the process."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from inferplane.errors import UsageError


def write_whole(path: Path, text: str) -> None:
    """Write a file whole, UTF-8, or leave what was there.

    Raises:
        UsageError: it cannot be written.
    """
    partial = path.absolute().with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(partial, "x", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}.", remedy="name a file in a folder of yours") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
