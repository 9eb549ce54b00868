"""Parses and formats memory sizes."""

from __future__ import annotations

import re
from fractions import Fraction

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)


def size_of(text: str) -> int:
    """Return the bytes of a size such as "80GiB", "24G", "512 MiB" or "7"; units are powers of 1024.

    Raises:
        ValueError: the text is not a size, or has a fraction of a byte.
    """
    found = _SIZE.fullmatch(text)
    if found is None or ("." in found[1] and not found[2]):
        raise ValueError(f"{text!r} is not a size")
    return int(Fraction(found[1]) * 1024 ** " kmgt".index(found[2].lower() or " "))


def format_bytes(count: float) -> str:
    """Format bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
