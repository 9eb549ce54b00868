"""Reads and checks the header of a GGUF file: its metadata, and where its tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every length is compared with the file's size before
anything is allocated for it; a damaged or hostile file is refused by a CheckpointError.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from inferplane.errors import CheckpointError
from inferplane.files import AGAIN, file_size
from inferplane.gguf.types import NOT_READ, READ, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 * 2**20
"""Largest header. The longest published ones, with a vocabulary of 260,000 tokens, have about 16 MB."""
MAX_KEYS = 2**12
MAX_TENSORS = 3 * 2**14
MAX_KEY_BYTES = 256
"""Longest key of metadata, and name of a tensor."""
MAX_STRINGS = 2**20
"""Most strings in all arrays. A large vocabulary has 260,000 tokens and 520,000 merges."""
MAX_DIMENSIONS = 4
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16
MAX_NUMBERS_BYTES = 2**16
"""Most bytes of a tensor whose values a config is made of."""

_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
"""Types of numbers in metadata, by their number in files."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies.

    Args:
        path: its file.
        type: of its blocks.
        shape: in torch's order, rows before columns.
        start: position in the file.
        nbytes: number of bytes.
    """

    path: Path
    type: TensorType
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says of itself.

    Args:
        metadata: numbers, truth values, strings, lists of strings or of truth values, and numpy arrays of numbers.
        tensors: by the names that the file has.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)


def read_header(path: Path) -> GGUFHeader:
    """Read the header of one GGUF file. No tensor is read.

    Raises:
        CheckpointError: the file is damaged, or of a version, byte order or with tensors of a type that is not read.
    """
    size = file_size(path)
    try:
        with open(path, "rb") as file:
            return _read(path, _Cursor(file, size))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.", remedy=AGAIN) from error
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged header: {error}.", remedy=AGAIN) from error


class _GoesOn(ValueError):
    """A header is longer than what there is to read."""


def find_ranges(beginning: bytes, size: int, also: Iterable[str] = ()) -> list[tuple[int, int]] | None:
    """Which bytes of a file a plan of its model reads, as first and end of each piece: the header, and some tensors.

    Args:
        beginning: the file's first bytes.
        size: of the file, in bytes.
        also: names of small tensors that are read, too.

    Returns:
        None if the header goes on after these bytes. Of a damaged header what is there: reading it says what is wrong.
    """
    scan = _Cursor(io.BytesIO(beginning), size)
    try:
        found = _read(Path("model.gguf"), scan)
    except _GoesOn:
        return None
    except (ValueError, CheckpointError):
        return [(0, len(beginning))]
    entries = [found.tensors[name] for name in also if name in found.tensors]
    small = [(entry.start, entry.start + entry.nbytes) for entry in entries if entry.nbytes <= MAX_NUMBERS_BYTES]
    return [(0, scan.at), *small]


class _Cursor:
    """Reads a file from its beginning, piece by piece; ValueError where it ends too early."""

    PIECE = 2**20

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size, self.at = file, size, 0
        self.data = bytearray()
        self.strings = 0

    def need(self, count: int) -> int:
        """Make the next bytes available in `data` and pass them; returns their position."""
        start = self.at
        stop = start + count
        if stop > self.size:
            raise ValueError(f"byte {start} begins {count} bytes, but the file has {self.size}")
        if stop > MAX_HEADER_BYTES:
            raise ValueError(f"it has more than {MAX_HEADER_BYTES} bytes, which is not plausible")
        if stop > len(self.data):
            self.data += self.file.read(max(stop - len(self.data), self.PIECE))
            if stop > len(self.data):
                raise _GoesOn("the file ends while it is read")
        self.at = stop
        return start

    def u32(self) -> int:
        """An unsigned number of 32 bits."""
        return int(struct.unpack_from("<I", self.data, self.need(4))[0])

    def u64(self) -> int:
        """An unsigned number of 64 bits."""
        return int(struct.unpack_from("<Q", self.data, self.need(8))[0])

    def string(self, most: int = MAX_HEADER_BYTES) -> str:
        """A string; bytes that are no UTF-8 become U+FFFD, as single tokens of byte vocabularies may be none."""
        count = self.u64()
        if count > most:
            raise ValueError(f"byte {self.at - 8} begins a string of {count} bytes; at most {most} are read")
        start = self.need(count)
        return self.data[start : start + count].decode(errors="replace")

    def key(self, what: str) -> str:
        """A key of metadata or the name of a tensor."""
        name = self.string(MAX_KEY_BYTES)
        if not name or not name.isprintable():
            raise ValueError(f"byte {self.at - len(name)} has {name!r} for {what}")
        return name

    def value(self, kind: int) -> Any:
        """A value of metadata."""
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            return np.frombuffer(self.data, dtype, 1, self.need(dtype.itemsize))[0].item()
        if kind == _BOOL:
            return self.flags(1)[0]
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise ValueError(f"byte {self.at - 4} has type {kind}, which does not exist")

    def flags(self, count: int) -> list[bool]:
        """Truth values."""
        start = self.need(count)
        found = self.data[start : start + count]
        if found.translate(None, b"\x00\x01"):
            raise ValueError(f"byte {start} begins truth values that are neither 0 nor 1")
        return list(map(bool, found))

    def array(self) -> Any:
        """An array of numbers, truth values or strings."""
        kind, count = self.u32(), self.u64()
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            start = self.need(count * dtype.itemsize)
            return np.frombuffer(bytes(self.data[start : self.at]), dtype)
        if kind == _BOOL:
            if count > MAX_STRINGS:
                raise ValueError(f"byte {self.at - 8} begins an array of {count} truth values")
            return self.flags(count)
        if kind != _STRING:
            raise ValueError(f"byte {self.at - 12} begins an array of type {kind}, which is not read")
        self.strings += count
        if self.strings > MAX_STRINGS or 8 * count > self.size - self.at:
            raise ValueError(f"byte {self.at - 8} begins an array of {count} strings, which is not plausible")
        return list(self._list_strings(count))

    def _list_strings(self, count: int) -> Iterator[str]:
        """Strings; a vocabulary has hundreds of thousands, so there is no call for each."""
        data, at = self.data, self.at
        length = _LENGTH.unpack_from
        for _ in range(count):
            if at + 8 > len(data):
                self.at = at
                self.need(8)
            start = at + 8
            (size,) = length(data, at)
            at = start + size
            if at > len(data):
                self.at = start
                self.need(size)
            yield data[start:at].decode(errors="replace") if size else ""
        self.at = at


def _read(path: Path, scan: _Cursor) -> GGUFHeader:
    start = scan.need(4)
    if (magic := bytes(scan.data[start:4])) != MAGIC:
        raise ValueError(f"it begins with {magic!r}, not with {MAGIC!r}")
    version = scan.u32()
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "is big-endian" if swapped in (1, *VERSIONS) else f"has version {version}"
        raise CheckpointError(
            f"{path} {what}, which is not read.",
            there_is=f"little-endian files of versions {' and '.join(map(str, VERSIONS))}",
            remedy="fetch the model in such a file, or convert it anew with llama.cpp",
        )
    tensors, keys = scan.u64(), scan.u64()
    if tensors > MAX_TENSORS or keys > MAX_KEYS:
        raise ValueError(f"it has {tensors} tensors and {keys} keys; at most {MAX_TENSORS} and {MAX_KEYS} are read")
    found = GGUFHeader()
    for _ in range(keys):
        key = scan.key("a key")
        if key in found.metadata:
            raise ValueError(f"key {key!r} is there twice")
        found.metadata[key] = scan.value(scan.u32())
    for _ in range(tensors):
        name = scan.key("a tensor's name")
        if name in found.tensors:
            raise ValueError(f"tensor {name!r} is there twice")
        try:
            found.tensors[name] = _read_entry(path, scan)
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from error
    return GGUFHeader(found.metadata, dict(_place(path, scan, found)))


def _read_entry(path: Path, scan: _Cursor) -> TensorEntry:
    """An entry of the table of tensors, whose start counts from the end of the header."""
    count = scan.u32()
    if not 1 <= count <= MAX_DIMENSIONS:
        raise ValueError(f"{count} dimensions; 1 to {MAX_DIMENSIONS} are read")
    shape = tuple(reversed([scan.u64() for _ in range(count)]))
    number, start = scan.u32(), scan.u64()
    if (kind := READ.get(number)) is None:
        if number not in NOT_READ:
            raise ValueError(f"type {number} does not exist")
        raise CheckpointError(
            f"{path}: a tensor is stored as {NOT_READ[number]}, which is not read.",
            there_is=", ".join(known.name for known in READ.values()),
            remedy="fetch the model in another quantization",
        )
    if 0 in shape or math.prod(shape) >= 2**60 or shape[-1] % kind.block:
        raise ValueError(f"shape {list(shape)} is none of {kind.name}, whose blocks have {kind.block} value(s)")
    return TensorEntry(path, kind, shape, start, math.prod(shape) // kind.block * kind.nbytes)


def _place(path: Path, scan: _Cursor, found: GGUFHeader) -> Iterator[tuple[str, TensorEntry]]:
    """The tensors with their positions in the file: one behind the other, each at a multiple of the alignment."""
    alignment = found.metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"{ALIGNMENT} is {alignment!r}, no power of 2 from 8 to {MAX_ALIGNMENT}")
    base = _align(scan.at, alignment)
    at = 0
    for name, entry in sorted(found.tensors.items(), key=lambda item: item[1].start):
        if entry.start != at:
            raise ValueError(f"tensor {name!r} is at byte {entry.start}; the one before it leaves off at {at}")
        if base + at + entry.nbytes > scan.size:
            raise CheckpointError(
                f"{path}: tensor {name!r} ends at byte {base + at + entry.nbytes}, but the file has {scan.size}.",
                remedy="fetch the file again: it is truncated",
            )
        yield name, TensorEntry(path, entry.type, entry.shape, base + at, entry.nbytes)
        at += _align(entry.nbytes, alignment)


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
