"""Reads the tensors of a checkpoint folder straight into their destination. Pickle files are never opened.

Files are read into the destination's own memory, not mapped: mapped pages would count as memory of the process in
addition to the weights.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from inferplane.errors import CheckpointError, first_of
from inferplane.hub.paddle_files import refuse_paddle_folder
from inferplane.models.reading.entries import EntriesByName
from inferplane.models.reading.file_reader import FileReader
from inferplane.models.reading.json_scanner import reporting_read_errors
from inferplane.models.reading.safetensors_header import SUFFIX, Entry, read_header, read_index
from inferplane.types import Shard

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHUNK_BYTES = 32 * 2**20
"""Size of the buffer for tensors that are converted or sliced while they are read."""


class SafetensorsFolder(EntriesByName[Entry]):
    """A `TensorSource` with the safetensors files of a folder.

    Which files are read: `model.safetensors` if it is there, as in transformers, and lacks nothing that a readable
    index names; else those that the index names; else all. If a tensor is stored twice, the file counts that the index
    names; without one, both must be equal.

    Args:
        folder: holds `*.safetensors` files, with or without an index (`model.safetensors.index.json`).
        spell: gives the tensors the names that families read (`names.canonical_names`).

    Attributes: `complaints`, sentences about oddities that do not prevent reading.

    Raises:
        CheckpointError: there are no such files, a header is damaged, or a tensor lies outside its file or is
            stored twice.
    """

    def __init__(self, folder: str | Path, spell: Callable[[dict[str, Entry]], dict[str, Entry]] = dict) -> None:
        self.folder = Path(folder)
        self._entries: dict[str, Entry] = {}
        self._open: FileReader | None = None
        complaints = []
        index = self._index()
        where: dict[str, str] = {}
        total_bytes = None
        try:
            if index is not None:
                where, total_bytes = read_index(index)
        except CheckpointError as error:
            if not (self.folder / SINGLE).exists():
                raise
            complaints.append(f"{error.what} {SINGLE} is read without it.")
            index = None
        if index is not None and SINGLE not in where.values() and (self.folder / SINGLE).exists():
            whole = where.keys() <= read_header(self.folder / SINGLE).keys()
            unused = "the index" if whole else SINGLE
            complaints.append(f"{self.folder} holds {SINGLE} and an index of other files; {unused} is not used.")
            if whole:
                index, where, total_bytes = None, {}, None
        for path in self._files() if index is None else self._shards(index, where):
            for name, entry in read_header(path).items():
                before = self._entries.get(name)
                if before is None or where.get(name) == path.name:
                    self._entries[name] = entry
                elif where.get(name) != before.path.name and not self._are_equal(before, entry):
                    raise CheckpointError(
                        f"Tensor {name!r} is in {before.path.name} and again in {path.name}, with other values.",
                        remedy="remove the stale files of an earlier export",
                    )
        if index is not None:
            complaints += self._check_index(index, where, total_bytes)
        self.complaints = tuple(complaints)
        self._entries = spell(self._entries)

    def _index(self) -> Path | None:
        """The shard index: the usual one, or the only one of another name (`model.safetensors.index.fp16.json`)."""
        expected = self.folder / INDEX
        if os.path.lexists(expected):
            return expected
        found = sorted(self.folder.glob("*.safetensors.index*.json"))
        return found[0] if len(found) == 1 else None

    def _check_index(self, index: Path, where: dict[str, str], stated: float | None) -> Iterator[str]:
        """Yield complaints if the index and its files do not fit.

        They are no errors: the model may not need what is missing, other readers ignore the total size, and published
        indexes may be wrong.
        """
        lost = [name for name, file in where.items() if name not in self._entries]
        moved = [name for name, file in where.items() if name not in lost and self._entries[name].path.name != file]
        if lost:
            yield f"{index} names {len(lost)} tensor(s) that its files do not hold: {first_of(lost)}."
        if moved:
            yield f"{index} places {len(moved)} tensor(s) in other files than those that hold them: {first_of(moved)}."
        held = sum(entry.nbytes for entry in self._entries.values())
        if stated is not None and stated != held and not lost:
            yield (
                f"{index} says that all tensors have {stated:.0f} bytes (total_size), its files hold {held}. All "
                "tensors that it names are there; check that no file comes from another export."
            )

    def _are_equal(self, one: Entry, other: Entry) -> bool:
        """Whether two tensors have the same bytes."""
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        for first in range(0, one.nbytes, CHUNK_BYTES):
            parts = [torch.empty(min(CHUNK_BYTES, one.nbytes - first), dtype=torch.uint8) for _ in range(2)]
            for entry, part in zip((one, other), parts):
                self._read(entry, first, part)
            if not torch.equal(*parts):
                return False
        return True

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes. Reads them until they differ."""
        return self._are_equal(self._entries[one], self._entries[other])

    def first_dtype(self) -> torch.dtype | None:
        """The dtype of 16 or more bits of the first tensor that has one, by the names of files, then of tensors."""
        first = min(self._floats(), key=lambda item: (item[1].path.name, item[0]), default=None)
        return None if first is None else first[1].dtype

    def _shards(self, index: Path, where: dict[str, str]) -> list[Path]:
        """The files that an index names."""
        files = [self.folder / n for n in sorted(set(where.values()))]
        with reporting_read_errors(self.folder):
            missing = [f.name for f in files if not f.exists()]
        if missing:
            raise CheckpointError(
                f"{index} names {len(missing)} file(s) that are not there: {first_of(missing, 3)}.",
                remedy="fetch the missing files",
            )
        return files

    def _files(self) -> list[Path]:
        """The safetensors files of a checkpoint without an index."""
        if (self.folder / SINGLE).exists():
            return [self.folder / SINGLE]
        files = sorted(self.folder.glob(f"*{SUFFIX}"))
        files = [f for f in files if not f.name.startswith("consolidated")] or files  # Mistral's own, of the same model
        if not files and (refused := refuse_paddle_folder(self.folder)) is not None:
            raise refused
        if not files:
            others = sorted(p.name for p in self.folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl"))
            raise CheckpointError(
                f"{self.folder} holds no *.safetensors.",
                there_is=f"{', '.join(others[:3])}, which may run code when opened and is never read" if others else "",
                remedy="convert the checkpoint to safetensors" if others else "fetch its weights: none are here",
            )
        return files

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """See `TensorSource.read_into`. Equal dtypes and whole rows go straight into `out`."""
        entry = self._entries[name]
        shape = entry.shape or (1,)
        first, last = shard.bounds(shape[shard.axis])
        mine = (*shape[: shard.axis], last - first, *shape[shard.axis + 1 :])
        if out.numel() != math.prod(mine):  # reading on would fill it with its neighbours' bytes
            raise CheckpointError(
                f"{entry.path}: {name} {entry.shape} does not fill {tuple(out.shape)}.",
                remedy="check that config.json belongs to these files",
            )
        out = out.view(mine)
        if entry.transposed:
            stored = torch.empty(tuple(reversed(shape)), dtype=entry.dtype)
            self._read(entry, 0, stored)
            out.copy_(stored.t().narrow(shard.axis, first, last - first))
            return
        if entry.interleaved:
            whole = torch.empty(shape, dtype=entry.dtype)
            self._read(entry, 0, whole)
            pairs = whole.unflatten(0, (-1, entry.interleaved // 2, 2)).transpose(1, 2).reshape(shape)
            out.copy_(pairs.narrow(shard.axis, first, last - first))
            return
        row_bytes = math.prod(shape[1:]) * entry.dtype.itemsize
        rows = range(first, last) if shard.axis == 0 else range(shape[0])
        columns = None if shard.axis == 0 or shard.is_whole else (first, last)
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

    def list_files(self) -> list[Path]:
        """The files that hold the tensors, by name."""
        return sorted({entry.path for entry in self._entries.values()})

    def _read(self, entry: Entry, offset: int, out: torch.Tensor) -> None:
        """Fill `out`'s memory from the file."""
        if self._open is None or self._open.path != entry.path:
            self.close()
            self._open = FileReader(entry.path)  # kept for the next tensor
        size = out.numel() * out.element_size()
        if size:
            held = (ctypes.c_char * size).from_address(out.data_ptr())
            held.owner = out  # type: ignore[attr-defined]  # threads that read hold it, whatever becomes of this call
            self._open.read(entry.start + offset, memoryview(held).cast("B"))

    def close(self) -> None:
        """Close the file that is open, if any."""
        if self._open is not None:
            self._open.close()
            self._open = None
