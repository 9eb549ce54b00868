"""Reads the headers of files with weights by ranges, and writes files that have nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from inferplane.hub.download import disk_error

FIRST_HEADER_BYTES = 2**17
"""How much of a file is read for its header at first: most headers are shorter."""
MAX_HEADER_BYTES = 16 * 2**20
"""Longer headers are read by no reader of safetensors here."""
FIRST_GGUF_BYTES, MAX_GGUF_BYTES = 2**20, 64 * 2**20
"""The same of GGUF files, whose headers hold the tokenizer: some megabytes."""
GetBytes = Callable[[int, int], bytes]
"""Position of a file's byte, and a number of bytes -> the bytes from there on; fewer at its end."""
FindRanges = Callable[[bytes, int], "list[tuple[int, int]] | None"]
"""A GGUF file's first bytes and its size -> first and end of each piece that a plan reads; None: more bytes tell."""
Pieces = list[tuple[int, bytes]]
"""Parts of a file, and where each begins."""


def read_safetensors(get: GetBytes, size: int) -> Pieces:
    """The length and the JSON in front of a file's tensors; less if they are not what they say."""
    if not size:
        return []
    header = get(0, FIRST_HEADER_BYTES)
    length = 8 + int.from_bytes(header[:8], "little")
    if len(header) < length <= min(size, MAX_HEADER_BYTES):
        header = get(0, length)
    return [(0, header[:length])]


def read_gguf(get: GetBytes, size: int, find_ranges: FindRanges) -> Pieces:
    """What a plan reads of a GGUF file."""
    beginning, limit = b"", min(size, MAX_GGUF_BYTES)
    while (ranges := find_ranges(beginning, size)) is None and len(beginning) < limit:
        more = get(len(beginning), min(max(FIRST_GGUF_BYTES, 4 * len(beginning)), limit) - len(beginning))
        if not more:
            break
        beginning += more
    behind = [(first, end) for first, end in ranges or () if end > len(beginning)]
    return [(0, beginning), *((first, get(first, end - first)) for first, end in behind)]


def write_pieces(path: Path, size: int, pieces: Iterable[tuple[int, bytes]]) -> None:
    """Write a file of a size of which only some pieces are known.

    Raises:
        CapacityError: the disk is full.
    """
    try:
        with path.open("wb") as out:
            for first, content in pieces:
                out.seek(first)
                out.write(content)
            out.truncate(size)
    except OSError as error:
        raise disk_error(error, path.parent) from error
