"""Reads the tensors of GGUF files under their published names, expanded or as packed blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from inferplane.errors import CheckpointError
from inferplane.gguf import GGUFHeader, Metadata, StoredTensor, TensorEntry, list_tensors
from inferplane.gguf.types import PLAIN, TensorType
from inferplane.models.reading.entries import EntriesByName
from inferplane.models.reading.file_reader import FileReader
from inferplane.models.reading.safetensors_header import Entry
from inferplane.types import Shard

CHUNK_BYTES = 32 * 2**20
"""Most bytes that are expanded at a time, in float32."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
METHOD = "gguf"
"""`quant_method` of configs of files with packed matrices."""
_EXPERT = re.compile(r"(\.experts\.)\d+\.")
_OPEN_FILES = 8


@dataclass(frozen=True, slots=True)
class GGUFEntry(Entry):
    """An `Entry` whose rows are blocks of a GGUF type; `dtype` is that of the expanded values.

    The fields behind `type`: as in `StoredTensor`.
    """

    type: TensorType = TensorType("F32", 1, 4)
    add: float = 0.0
    second: TensorEntry | None = None
    join: str = ""
    is_exponential: bool = False
    order: tuple[int, ...] = ()
    column_order: tuple[int, ...] = ()


def entry_of(stored: StoredTensor) -> GGUFEntry:
    """The entry of a tensor under its published name."""
    at, shape = stored.entry, stored.entry.shape
    if stored.second is not None:
        other = stored.second.shape
        shape = (2 * shape[0], *shape[1:]) if stored.join == "alternate" else shape
        if stored.join == "alternate" and shape[0] == 2 and len(other) == 2 and at.type.name in PLAIN:
            shape = (1, 2 * other[1]) if other[0] == 1 else shape
        if stored.join == "rows":
            shape = (shape[0] + other[0], *shape[1:])
        if stored.join == "kv_b":
            shape = (shape[0] * (shape[2] + other[1]), shape[1])
    dtype = DTYPES.get(at.type.name, torch.float32) if not stored.join else torch.float32
    return GGUFEntry(
        *(at.path, dtype, shape, at.start, at.nbytes, stored.interleaved),
        type=at.type,
        add=stored.add,
        second=stored.second,
        join=stored.join,
        is_exponential=stored.is_exponential,
        order=stored.order,
        column_order=stored.column_order,
    )


def expand(raw: torch.Tensor, kind: TensorType, columns: int) -> torch.Tensor:
    """Values of packed rows.

    Args:
        raw: uint8 `[rows, bytes a row]`.
        kind: of the blocks.
        columns: values a row.

    Returns:
        `[rows, columns]`, float32 or what is stored.
    """
    if kind.name in DTYPES:
        return raw.view(DTYPES[kind.name]).reshape(-1, columns)
    import gguf

    numbers = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind.name])
    return torch.from_numpy(numbers).reshape(-1, columns)


class GGUFSource(EntriesByName[GGUFEntry]):
    """A `TensorSource` with the tensors of GGUF files.

    Args:
        header: of the model's files.
        meta: its metadata.
        spell: gives the tensors the names that families read (`names.canonical_names`).

    Attributes: `complaints`, sentences about oddities that do not prevent reading: none are known.

    Raises:
        CheckpointError: a tensor has no place in the architecture, or an impossible shape.
    """

    complaints: tuple[str, ...] = ()

    def __init__(
        self,
        header: GGUFHeader,
        meta: Metadata,
        spell: Callable[[dict[str, Entry]], dict[str, Entry]] = dict,
    ) -> None:
        found: dict[str, Entry] = {name: entry_of(one) for name, one in list_tensors(meta, header.tensors).items()}
        self._entries = cast("dict[str, GGUFEntry]", spell(found))
        self._files: dict[Path, FileReader] = {}

    def find_packed_type(self, name: str) -> str | None:
        """The GGUF type of a matrix whose rows `raw` gives as they are packed; None if it is not packed, or its values
        are not those of the file."""
        entry = self._entries.get(name)
        if entry is None or entry.type.name in PLAIN or len(entry.shape) < 2:
            return None
        is_changed = entry.add != 0 or entry.is_exponential or bool(entry.column_order) or entry.join == "kv_b"
        if is_changed or (entry.second is not None and entry.second.type != entry.type):
            return None
        return entry.type.name

    def raw(self, name: str, first: int = 0, rows: int | None = None) -> tuple[str, torch.Tensor]:
        """Packed rows of a matrix, in the published order.

        Args:
            name: of a tensor for which `find_packed_type` gives a type.
            first: number of the first row; dims but the last count as one.
            rows: number of rows; None: all from there.

        Returns:
            The type's name, and uint8 `[rows, bytes a row]`.

        Raises:
            CheckpointError: the file cannot be read, or the tensor is not packed.
        """
        kind = self.find_packed_type(name)
        if kind is None:
            raise CheckpointError(
                f"Tensor {name!r} is not packed, or not as its model has it.", remedy="read its values (read_into)"
            )
        entry = self._entries[name]
        total = math.prod(entry.shape[:-1])
        return kind, self._rows(entry, first, total - first if rows is None else rows)

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same shape and values. Reads them whole."""
        a, b = self._entries[one], self._entries[other]
        if a == b:
            return True
        return a.shape == b.shape and torch.equal(self._read_values(a), self._read_values(b))

    def first_dtype(self) -> torch.dtype | None:
        """As `main_dtype`: files have their vectors in float32, wherever these lie."""
        return self.main_dtype()

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """See `TensorSource.read_into`: values are expanded some rows at a time."""
        entry = self._entries[name]
        shape = entry.shape
        first, last = (0, shape[0]) if shard.is_whole else shard.bounds(shape[shard.axis])
        if entry.join == "kv_b" or len(shape) == 1:
            values = self._read_values(entry)
            out.copy_(values if shard.is_whole else values.narrow(shard.axis, first, last - first))
            return
        by_rows = shard.is_whole or shard.axis == 0
        inner = math.prod(shape[1:-1])
        step = max(1, CHUNK_BYTES // (4 * inner * shape[-1]))
        rows = range(first, last) if by_rows else range(shape[0])
        for row in range(rows.start, rows.stop, step):
            n = min(step, rows.stop - row)
            values = self._values(entry, row * inner, n * inner).reshape(n, *shape[1:])
            part = values if by_rows else values.narrow(shard.axis, first, last - first)
            out[row - rows.start : row - rows.start + n].copy_(part)

    def _read_values(self, entry: GGUFEntry) -> torch.Tensor:
        """All values of a tensor."""
        if entry.order and len(entry.shape) == 1:
            plain = replace(entry, order=())
            return self._read_values(plain)[list(entry.order)]
        if entry.join != "kv_b" and (len(entry.shape) > 1 or not entry.interleaved):
            return self._values(entry, 0, math.prod(entry.shape[:-1])).reshape(entry.shape)
        if entry.join != "kv_b":  # a bias, whose entries are in the order of its matrix's rows
            values = self._expand(entry.path, entry.start, entry.nbytes, entry.type, entry.shape[0])
            return values.unflatten(-1, (-1, entry.interleaved // 2, 2)).transpose(-1, -2).reshape(entry.shape)
        assert entry.second is not None
        heads, latent = entry.second.shape[0], entry.second.shape[2]
        nope = entry.shape[0] // heads - entry.second.shape[1]
        k = self._expand(entry.path, entry.start, entry.nbytes, entry.type, nope).reshape(heads, latent, nope)
        v = self._expand(entry.second.path, entry.second.start, entry.second.nbytes, entry.second.type, latent)
        joined = [k.float().transpose(1, 2), v.float().reshape(heads, -1, latent)]
        return torch.cat(joined, dim=1).reshape(entry.shape)

    def _expand(self, path: Path, start: int, nbytes: int, kind: TensorType, columns: int) -> torch.Tensor:
        row_bytes = columns // kind.block * kind.nbytes
        raw = torch.empty((nbytes // row_bytes, row_bytes), dtype=torch.uint8)
        self._read(path, start, raw)
        return expand(raw, kind, columns)

    def _values(self, entry: GGUFEntry, first: int, count: int) -> torch.Tensor:
        """Values of some rows, `[count, columns]`."""
        columns = entry.shape[-1]
        if entry.join == "alternate" and (entry.shape[0] == 1 or self._differ(entry)):
            values = self._alternate_values(entry)[first : first + count]
        elif entry.join == "rows" and self._differ(entry):
            values = self._join_values(entry)[first : first + count]
        else:
            values = expand(self._rows(entry, first, count), entry.type, columns)
        if entry.column_order:
            values = values[:, list(entry.column_order)]
        if entry.add:
            values = values.float() + entry.add
        if entry.is_exponential:
            values = torch.log(-values.float())
        return values

    def _differ(self, entry: GGUFEntry) -> bool:
        return entry.second is not None and entry.second.type != entry.type

    def _alternate_values(self, entry: GGUFEntry) -> torch.Tensor:
        """Values of two tensors in turn, where rows of blocks cannot be: a bias, or two types."""
        assert entry.second is not None
        columns = entry.second.shape[-1]
        one = self._expand(entry.path, entry.start, entry.nbytes, entry.type, columns)
        other = self._expand(entry.second.path, entry.second.start, entry.second.nbytes, entry.second.type, columns)
        axis = 2 if entry.shape[0] == 1 else 1
        return torch.stack((one.float(), other.float()), dim=axis).reshape(entry.shape)

    def _join_values(self, entry: GGUFEntry) -> torch.Tensor:
        """Values of two tensors of different types, one's rows before the other's, in their order."""
        assert entry.second is not None
        columns, second = entry.second.shape[-1], entry.second
        one = self._expand(entry.path, entry.start, entry.nbytes, entry.type, columns)
        other = self._expand(second.path, second.start, second.nbytes, second.type, columns)
        return torch.cat((one.float(), other.float()))[list(entry.order)]

    def _rows(self, entry: GGUFEntry, first: int, count: int) -> torch.Tensor:
        """Packed rows in the published order, uint8 `[count, bytes a row]`."""
        row_bytes = entry.shape[-1] // entry.type.block * entry.type.nbytes
        if entry.order:
            parts = [(entry.path, entry.start, entry.nbytes)]
            if entry.second is not None:
                parts.append((entry.second.path, entry.second.start, entry.second.nbytes))
            both = torch.empty((sum(nbytes for *_, nbytes in parts) // row_bytes, row_bytes), dtype=torch.uint8)
            at = 0
            for path, start, nbytes in parts:
                self._read(path, start, both[at : at + nbytes // row_bytes])
                at += nbytes // row_bytes
            return both[list(entry.order[first : first + count])]
        if entry.second is not None:
            begin, stop = first // 2, -(-(first + count) // 2)
            both = torch.empty((stop - begin, 2, row_bytes), dtype=torch.uint8)
            starts = (entry.path, entry.start), (entry.second.path, entry.second.start)
            for i, (path, start) in enumerate(starts):
                half = torch.empty((stop - begin, row_bytes), dtype=torch.uint8)
                self._read(path, start + begin * row_bytes, half)
                both[:, i] = half
            return both.reshape(-1, row_bytes)[first - 2 * begin : first - 2 * begin + count]
        size, begin, stop = entry.interleaved, first, first + count
        if size:
            begin, stop = (first // size) * size, -(-(first + count) // size) * size
        raw = torch.empty((stop - begin, row_bytes), dtype=torch.uint8)
        self._read(entry.path, entry.start + begin * row_bytes, raw)
        if size:
            raw = raw.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).reshape(raw.shape)
            raw = raw[first - begin : first - begin + count]
        return raw

    def _read(self, path: Path, start: int, out: torch.Tensor) -> None:
        """Fill a tensor of bytes from a file."""
        if path not in self._files:
            if len(self._files) >= _OPEN_FILES:
                self.close()
            self._files[path] = FileReader(path)
        if out.numel():
            self._files[path].read(start, memoryview(out.numpy().data).cast("B"))

    def close(self) -> None:
        """Close the files that are open."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def quantization(self) -> dict[str, Any] | None:
        """The `quantization_config` of a config with these tensors: the method "gguf", and the type of each packed
        matrix by its name, in which `*` stands for the number of an expert; None if none is packed."""
        packed = ((name, self.find_packed_type(name)) for name in self._entries)
        types = {_EXPERT.sub(r"\1*.", name): kind for name, kind in packed if kind is not None}
        return {"quant_method": METHOD, "types": types} if types else None
