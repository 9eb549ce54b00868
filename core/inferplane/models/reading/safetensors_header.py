"""Reads and checks what safetensors headers and shard indexes say about tensors.

Format: https://github.com/huggingface/safetensors, "Format"; an 8-byte length, a JSON header, the tensors' bytes
without gaps or overlaps.
"""

from __future__ import annotations

import math
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from inferplane.errors import CheckpointError
from inferplane.files import AGAIN, file_size
from inferplane.models.reading.json_scanner import JsonScanner, open_scanner, reporting_read_errors

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
NOT_READ = ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""Dtypes of safetensors that this version, or this torch, does not read."""
SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 3 * 2**14
"""Most tensors in one file. 94 layers with 128 experts each would be 37,000. This many take less than a second."""
MAX_INDEX_BYTES = 20 * 2**20
MAX_INDEXED_TENSORS = 3 * 2**16
"""Most tensors in an index. 60 layers of 384 experts, with scales, make about 140,000."""
MAX_FILES = 2**12
"""Most files in an index; the largest published checkpoints have some hundreds."""
MAX_FILE_NAME_BYTES = 255
"""File systems do not allow longer names."""
MAX_DIMS = 16

LISTS = ("shape", "data_offsets")
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_MEMBER = rf'"(dtype|shape|data_offsets)":("[A-Z0-9_]{{1,16}}"|\[(?:{_NUMBER}(?:,{_NUMBER}){{0,{MAX_DIMS}}})?\])'
_ENTRY = re.compile(rf"\{{{_MEMBER},{_MEMBER},{_MEMBER}\}}")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor is stored: file, dtype, shape, and the position and number of its bytes.

    `interleaved`: rows of a head whose rotated pairs lie side by side in the file, and half a head apart when they are
    read; 0: rows are read as they lie. `transposed`: a matrix `[N, K]` lies in the file as `[K, N]`.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int
    interleaved: int = 0
    transposed: bool = False


def read_header(path: Path) -> dict[str, Entry]:
    """Read the entries of a safetensors file. Only the header is read.

    Raises:
        CheckpointError: the file is damaged; the message names the file, the tensor and the impossible bytes.
    """
    size = file_size(path)
    with reporting_read_errors(path), open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= size - 8:
            raise CheckpointError(
                f"{path} is no safetensors file: it says its header has {length} bytes, the file has {size}.",
                remedy=AGAIN,
            )
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path} has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read.",
                remedy="split the checkpoint into shards, or fetch the file again",
            )
        try:
            found = _scan_header(path, JsonScanner(file.read(length)), 8 + length)
        except ValueError as error:
            raise CheckpointError(f"{path} has a damaged header: {error}.", remedy=AGAIN) from error
    _check_no_gaps(path, found, 8 + length, size)
    return found


def _scan_header(path: Path, scan: JsonScanner, base: int) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    described = False
    if scan.text[:1] != "{":
        raise ValueError(f"it begins with {scan.text[:1]!r}, not with an object")
    for name in scan.members():
        if name == "__metadata__":
            if described:
                raise ValueError("__metadata__ is there twice")
            described = True
            for key in scan.members():
                _skip_metadata(scan, key)
        elif name in found:
            raise ValueError(f"tensor {name!r} is there twice")
        elif len(found) == MAX_TENSORS:
            raise ValueError(f"it has more than {MAX_TENSORS} tensors; split the checkpoint into shards")
        else:
            try:
                found[name] = _scan_entry(path, scan, base)
            except ValueError as error:
                raise ValueError(f"tensor {name!r}: {error}") from error
    scan.end()
    return found


def _skip_metadata(scan: JsonScanner, key: str) -> None:
    """Skip one value of `__metadata__`; it must be a string."""
    if scan.skip()[:1] != '"':
        raise ValueError(f"__metadata__ holds no string under {key!r}")


def _match_compact_entry(scan: JsonScanner) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """Read the dtype, shape and offsets of an entry that is written without spaces; None if it is written otherwise.

    One regular expression is several times faster than scanning member by member, and nearly all files are written so.
    """
    if (found := _ENTRY.match(scan.text, scan.at)) is None:
        return None
    parts = {found[1]: found[2], found[3]: found[4], found[5]: found[6]}
    if len(parts) < 3 or parts["dtype"][0] != '"' or '"' in (parts["shape"][0], parts["data_offsets"][0]):
        return None
    scan.at = found.end()
    shape, offsets = (tuple(map(int, parts[k][1:-1].split(","))) if len(parts[k]) > 2 else () for k in LISTS)
    return parts["dtype"][1:-1], shape, offsets


def _scan_entry_members(scan: JsonScanner) -> tuple[str | None, tuple[int, ...] | None, tuple[int, ...] | None]:
    dtype, shape, offsets = None, None, None
    for key in scan.members():
        if key == "dtype" and dtype is None:
            dtype = scan.string()
        elif key == "shape" and shape is None:
            shape = scan.sizes()
        elif key == "data_offsets" and offsets is None:
            offsets = scan.sizes()
        else:
            raise ValueError(f"{key!r} is unexpected, or there twice")
    return dtype, shape, offsets


def _scan_entry(path: Path, scan: JsonScanner, base: int) -> Entry:
    dtype, shape, offsets = _match_compact_entry(scan) or _scan_entry_members(scan)
    if dtype is None or shape is None or offsets is None or len(offsets) != 2:
        raise ValueError("it lacks its dtype, its shape, or two data_offsets")
    if dtype not in DTYPES and dtype in NOT_READ:
        raise CheckpointError(
            f"{path}: a tensor is stored as {dtype}, which is not read.",
            there_is=", ".join(DTYPES),
            remedy="fetch the checkpoint in another format",
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"{len(shape)} dimensions; at most {MAX_DIMS} are read")
    if math.prod(max(n, 1) for n in shape) * DTYPES[dtype].itemsize >= 2**63:
        raise ValueError(f"shape {list(shape)} of {dtype} is one that no memory holds")
    (start, stop), want = offsets, math.prod(shape) * DTYPES[dtype].itemsize
    if stop - start != want:
        raise ValueError(f"bytes {start} to {stop}, but shape {list(shape)} of {dtype} takes {want}")
    return Entry(path, DTYPES[dtype], shape, base + start, want)


def _check_no_gaps(path: Path, found: dict[str, Entry], base: int, size: int) -> None:
    """Raise CheckpointError unless the tensors cover every byte from the header to the end of the file exactly once."""
    at, before = base, ""
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != at:
            how = "overlaps" if entry.start < at else "leaves a gap behind"
            raise CheckpointError(
                f"{path}: tensor {name!r} at byte {entry.start - base} {how} {before or 'the header'}, which ends at "
                f"{at - base}.",
                remedy=AGAIN,
            )
        at, before = at + entry.nbytes, f"tensor {name!r}"
        if at > size:
            raise CheckpointError(
                f"{path}: {before} ends at byte {at - base}, but only {size - base} are there.",
                remedy="fetch the file again: it is truncated",
            )
    if at != size:
        raise CheckpointError(f"{path} has {size - at} bytes behind its last tensor.", remedy=AGAIN)


class Index(NamedTuple):
    """A shard index: the file of each tensor, and the total size in bytes that the index states."""

    where: dict[str, str]
    total_bytes: float | None


def read_index(path: Path) -> Index:
    """Read `model.safetensors.index.json`.

    Raises:
        CheckpointError: the file is no index, names a tensor twice, or names anything but a safetensors file beside it.
    """
    scan = open_scanner(path, MAX_INDEX_BYTES)
    where: dict[str, str] | None = None
    total_bytes: float | None = None
    files: dict[str, str] = {}
    try:
        for key in scan.members():
            if key == "metadata":
                total_bytes = _scan_total_bytes(scan)
                continue
            if key != "weight_map":
                scan.skip()
                continue
            if where is not None:
                raise ValueError("weight_map is there twice")
            where = {}
            for name in scan.members():
                file = scan.string()
                if name in where:
                    raise ValueError(f"tensor {name!r} is there twice")
                if file not in files:
                    if not _is_shard(file):
                        raise ValueError(f"tensor {name!r} is to be in {file!r}, no {SUFFIX} file of its folder")
                    if len(files) == MAX_FILES:
                        raise ValueError(f"it names more than {MAX_FILES} files")
                    files[file] = file
                if len(where) == MAX_INDEXED_TENSORS:
                    raise ValueError(f"it names more than {MAX_INDEXED_TENSORS} tensors")
                where[name] = files[file]
        scan.end()
    except ValueError as error:
        raise CheckpointError(f"{path} is not a shard index: {error}.", remedy=AGAIN) from error
    if not where:
        raise CheckpointError(f"{path} is not a shard index: it has no weight_map with tensors.", remedy=AGAIN)
    return Index(where, total_bytes)


def _is_shard(file: str) -> bool:
    """Whether this can be the name of a safetensors file in the same folder."""
    if Path(file).name != file or not file.endswith(SUFFIX) or not file.isprintable():
        return False
    return len(file.encode()) <= MAX_FILE_NAME_BYTES


def _scan_total_bytes(scan: JsonScanner) -> float | None:
    """Skip an index's metadata and return its total_size if it has one that is a number; the entry is optional."""
    found = None
    if scan.peek() != "{":
        scan.skip()
        return None
    for key in scan.members():
        value = scan.skip(1)
        if key == "total_size":
            with suppress(ValueError):
                found = float(value)
    return found
