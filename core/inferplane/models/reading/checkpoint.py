"""Reads the tensors of a checkpoint folder straight into their destination. Pickle files are never opened.

Files are read into the destination's own memory, not mapped: mapped pages would count as memory of the process in
addition to the weights.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from inferplane.errors import CheckpointError, first_of
from inferplane.models.reading.file_reader import FileReader
from inferplane.models.reading.json_scanner import reporting_read_errors
from inferplane.models.reading.safetensors_header import SUFFIX, Entry, read_header, read_index
from inferplane.types import Shard

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHUNK_BYTES = 32 * 2**20
"""Size of the buffer for tensors that are converted or sliced while they are read."""


class SafetensorsFolder:
    """A `TensorSource` with the safetensors files of a folder.

    Args:
        folder: holds `*.safetensors` files, with or without an index `model.safetensors.index.json`.

    Attributes: `complaints`, sentences about oddities that do not prevent reading.

    Raises:
        CheckpointError: there are no such files, a header is damaged, or a tensor lies outside its file or is
            stored twice.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._entries: dict[str, Entry] = {}
        self._open: FileReader | None = None
        index = self.folder / INDEX
        where, total_bytes = read_index(index) if os.path.lexists(index) else (None, None)
        for path in self._files() if where is None else self._shards(where):
            for name, entry in read_header(path).items():
                if name in self._entries:
                    raise CheckpointError(
                        f"Tensor {name!r} is in {self._entries[name].path.name} and again in {path.name}.",
                        remedy="remove the stale files of an earlier export",
                    )
                self._entries[name] = entry
        for name, file in (where or {}).items():
            if name not in self._entries or self._entries[name].path.name != file:
                raise CheckpointError(
                    f"{index} says that tensor {name!r} is in {file}, which does not hold it.",
                    there_is=f"one in {self._entries[name].path.name}" if name in self._entries else "",
                    remedy="fetch the index and its files again",
                )
        self.complaints = tuple(self._check_total(index, total_bytes))

    def _check_total(self, index: Path, stated: float | None) -> Iterator[str]:
        """Yield a complaint if the index states another total size than its files have.

        It is no error: other readers ignore the entry, and published indexes may be wrong.
        """
        held = sum(entry.nbytes for entry in self._entries.values())
        if stated is not None and stated != held:
            yield (
                f"{index} says that all tensors have {stated:.0f} bytes (total_size), its files hold {held}. All "
                "tensors that it names are there; check that no file comes from another export."
            )

    def _shards(self, where: dict[str, str]) -> list[Path]:
        """The files that an index names."""
        names = sorted(set(where.values()))
        files = [self.folder / n for n in names]
        with reporting_read_errors(self.folder):
            both = SINGLE not in names and (self.folder / SINGLE).exists()
            missing = [f.name for f in files if not f.exists()]
        if both:
            raise CheckpointError(
                f"{self.folder} holds {SINGLE} and an index of other files: it is not clear which are meant.",
                remedy="remove the stale files of an earlier export",
            )
        if missing:
            raise CheckpointError(
                f"{self.folder / INDEX} names {len(missing)} file(s) that are not there: {first_of(missing, 3)}.",
                remedy="fetch the missing files",
            )
        return files

    def _files(self) -> list[Path]:
        """All safetensors files of the folder, for checkpoints without an index."""
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
