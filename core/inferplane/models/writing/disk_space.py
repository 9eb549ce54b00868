"""Space on the disk that a copy is written to: whether it suffices, and the error where it did not."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from inferplane.errors import CapacityError, InferplaneError, UsageError
from inferplane.files import FULL
from inferplane.units import format_bytes

ELSEWHERE = "free space, or choose a folder on another disk"
GOES_ON = "; then run the same command, which goes on with what is calibrated"


def check_space(folder: Path, takes: Mapping[str, int]) -> None:
    """Raise CapacityError if a disk has not the space that is needed.

    Args:
        folder: on the disk; need not exist.
        takes: what will be written -> its most bytes.
    """
    free = _count_free(folder)
    if sum(takes.values()) > free:
        raise CapacityError(f"{_describe(takes)}, and the disk has {format_bytes(free)} free.", remedy=ELSEWHERE)


def refuse_write(error: OSError, folder: Path, takes: Mapping[str, int], *, goes_on: bool) -> InferplaneError:
    """The error for a file that could not be written: CapacityError where the disk is full, else UsageError.

    Args:
        error: of the call that wrote it.
        folder: on the disk; need not exist.
        takes: what is still to be written -> its most bytes.
        goes_on: whether the same command goes on with what is there.
    """
    if error.errno not in FULL:
        what = f"{next(iter(takes))} cannot be written: {error.strerror or error}."
        return UsageError(what, remedy="choose another folder, or free space")
    return CapacityError(
        f"The disk of {folder} is full: {_describe(takes)}, and {format_bytes(_count_free(folder))} are free.",
        remedy=f"{ELSEWHERE}{GOES_ON if goes_on else ''}",
    )


def _count_free(folder: Path) -> int:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def _describe(takes: Mapping[str, int]) -> str:
    return " and ".join(f"{what} takes up to {format_bytes(nbytes)} more" for what, nbytes in takes.items())
