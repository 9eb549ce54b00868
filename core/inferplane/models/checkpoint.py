"""Checkpoint folders: safetensors read straight into their destination. Pickle files are never opened.

Files are read with plain reads into the destination's own memory, not mapped: mapped pages would count as the
process's memory next to the weights themselves.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from inferplane.errors import CheckpointError
from inferplane.types import Shard

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
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SUFFIX = ".safetensors"
SINGLE = "model.safetensors"
HEADER_LIMIT_BYTES = 100 * 2**20
CHUNK_BYTES = 32 * 2**20
"""Staging for tensors that need converting or slicing."""


@dataclass(frozen=True)
class _Entry:
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class SafetensorsFolder:
    """The tensors of a folder, by the names in its index or in its files. A `TensorSource`.

    Args:
        folder: holds `*.safetensors`, sharded with `model.safetensors.index.json` or not.

    Raises:
        CheckpointError: no such files, a damaged header, a tensor that lies outside its file or is there twice.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._entries: dict[str, _Entry] = {}
        self._open: tuple[Path, IO[bytes]] | None = None
        for path in self._files():
            for name, entry in _header(path).items():
                if name in self._entries:
                    raise CheckpointError(
                        f"Tensor {name!r} is in {self._entries[name].path.name} and again in {path.name}.",
                        remedy="remove the stale files of an earlier export",
                    )
                self._entries[name] = entry

    def _files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{index} is not a shard index ({error}).", remedy="fetch it again") from error
            if bad := [n for n in names if not isinstance(n, str) or Path(n).name != n or not n.endswith(SUFFIX)]:
                raise CheckpointError(
                    f"{index} names {bad[0]!r}, which is no {SUFFIX} file of its folder.", remedy="fetch it again"
                )
            if SINGLE not in names and (self.folder / SINGLE).exists():
                raise CheckpointError(
                    f"{self.folder} holds {SINGLE} and an index of other files: it is not clear which are meant.",
                    remedy="remove the stale files of an earlier export",
                )
            files = [self.folder / n for n in names]
            if missing := [f.name for f in files if not f.exists()]:
                raise CheckpointError(
                    f"{index} names {len(missing)} file(s) that are not there: "
                    f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}.",
                    remedy="fetch the missing files",
                )
            return files
        files = sorted(self.folder.glob(f"*{SUFFIX}"))
        if not files:
            others = sorted(p.name for p in self.folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl"))
            raise CheckpointError(
                f"{self.folder} holds no *.safetensors.",
                there_is=f"{', '.join(others[:3])}, which may run code when opened and is never read" if others else "",
                remedy="convert the checkpoint to safetensors",
            )
        return files

    def names(self) -> Iterable[str]:
        """See `TensorSource.names`."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource.shape`."""
        entry = self._entries.get(name)
        return None if entry is None else entry.shape

    def dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource.dtype`."""
        entry = self._entries.get(name)
        return None if entry is None else entry.dtype

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """See `TensorSource.read_into`. Equal dtypes and whole rows go straight into `out`."""
        entry = self._entries[name]
        shape = entry.shape or (1,)
        first, last = shard.bounds(shape[shard.axis])
        mine = (*shape[: shard.axis], last - first, *shape[shard.axis + 1 :])
        if out.numel() != math.prod(mine):  # reading on would fill it with its neighbours' bytes
            raise CheckpointError(f"{entry.path}: {name} {entry.shape} does not fill {tuple(out.shape)}.")
        out = out.view(mine)
        row_bytes = math.prod(shape[1:]) * entry.dtype.itemsize
        rows = range(first, last) if shard.axis == 0 else range(shape[0])
        columns = None if shard.axis == 0 or shard.size == 1 else (first, last)
        if columns is None and out.dtype == entry.dtype and out.is_contiguous():
            self._read(entry, rows.start * row_bytes, out)
            return
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for row in range(rows.start, rows.stop, step):
            n = min(step, rows.stop - row)
            staging = torch.empty((n, *shape[1:]), dtype=entry.dtype)
            self._read(entry, row * row_bytes, staging)
            part = staging if columns is None else staging[:, columns[0] : columns[1]]
            out[row - rows.start : row - rows.start + n].copy_(part)

    def _read(self, entry: _Entry, offset: int, out: torch.Tensor) -> None:
        """Fill `out`'s memory from the file."""
        if self._open is None or self._open[0] != entry.path:
            self.close()
            self._open = entry.path, open(entry.path, "rb", buffering=0)  # noqa: SIM115 - kept for the next tensor
        file = self._open[1]
        want = out.numel() * out.element_size()
        if not want:
            return
        memory = memoryview((ctypes.c_char * want).from_address(out.data_ptr())).cast("B")
        file.seek(entry.start + offset)
        done = 0
        while done < want:
            got = file.readinto(memory[done:])  # type: ignore[attr-defined]
            if not got:
                raise CheckpointError(f"{entry.path} ends before its tensors do.", remedy="fetch the file again")
            done += got

    def close(self) -> None:
        """Close the file that is open, if any."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _header(path: Path) -> dict[str, _Entry]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
            raise CheckpointError(
                f"{path} is no safetensors file: it says its header has {length} bytes, the file has {size}.",
                remedy="fetch the file again",
            )
        try:
            header = json.loads(file.read(length))
            return {n: _entry(path, n, e, 8 + length, size) for n, e in header.items() if n != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} has a damaged header: {error!r}.", remedy="fetch the file again") from error


def _entry(path: Path, name: str, entry: dict[str, Any], base: int, size: int) -> _Entry:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {entry['dtype']!r}.", there_is=", ".join(DTYPES), remedy="convert it"
        )
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if any(not isinstance(n, int) or n < 0 for n in (*shape, start, stop)):
        raise CheckpointError(f"{path}: tensor {name!r} has a shape or offsets that are no sizes.")
    if stop - start != math.prod(shape) * dtype.itemsize or base + stop > size:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(shape)} lies at bytes {start} to {stop}, which does not fit its "
            f"shape or the file's {size} bytes.",
            remedy="fetch the file again",
        )
    return _Entry(path, dtype, shape, base + start)
