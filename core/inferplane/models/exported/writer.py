"""Writes the packed weights of one rank: safetensors files, and their layout."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from inferplane.errors import KernelError, in_words
from inferplane.models.exported.checksum import as_bytes, checksum
from inferplane.models.reading.safetensors_header import DTYPES, SUFFIX
from inferplane.types import HOST, PackedStorage, Packing, StoredWeight

LAYOUT = "layout.json"
ALIGNMENT = 64
FILE_BYTES = 8 * 2**30
"""Bytes of a file after which another one begins."""
HEADER_BYTES = 2**16
"""Bytes of a file's header, which is written last: it is filled up with spaces, as the format allows."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _TensorFile:
    """One safetensors file. Tensors are aligned, with tensors called "pad.N" between them: the format has no gaps."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.header_bytes = path, 0, 2
        self._entries: dict[str, Any] = {}
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115 - `close` closes it
        self._file.seek(HEADER_BYTES)

    def has_space(self, name: str) -> bool:
        return self.size < FILE_BYTES and self.header_bytes + 2 * (len(name) + 160) < HEADER_BYTES - 8

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """Append a dense tensor on the host, and return its checksum."""
        if pad := -self.size % ALIGNMENT:
            self._append(f"pad.{len(self._entries)}", "U8", [pad], memoryview(bytes(pad)))
        memory = as_bytes(tensor)
        self._append(name, NAMES[tensor.dtype], list(tensor.shape), memory)
        return checksum(memory)

    def _append(self, name: str, dtype: str, shape: list[int], memory: memoryview) -> None:
        first, self.size = self.size, self.size + len(memory)
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, self.size]}
        self.header_bytes += len(json.dumps({name: self._entries[name]}, separators=(",", ":")))
        self._file.write(memory)

    def close(self) -> None:
        """Write the header."""
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        self._file.seek(0)
        self._file.write(struct.pack("<Q", HEADER_BYTES - 8) + header.ljust(HEADER_BYTES - 8))
        self._file.close()


class RankWriter:
    """The folder of one rank, made by it.

    Args:
        folder: a new folder.
        sites: number of each weight -> its places in the model.

    Attributes: `nbytes`, of all packed weights.
    """

    def __init__(self, folder: Path, sites: dict[int, list[str]]) -> None:
        folder.mkdir()
        self.folder, self.nbytes = folder, 0
        self._sites = sites
        self._weights: dict[int, dict[str, Any]] = {}
        self._files: list[_TensorFile] = []
        self._shared: tuple[int, dict[tuple[Any, ...], tuple[str, int, torch.Tensor]]] = (-1, {})

    def write(self, number: int, packing: Packing, packed: Any) -> None:
        """Append a weight in one packing. Packings of a weight that share memory share it in the file too.

        Raises:
            KernelError: it cannot be written.
        """
        storage = packing.storage or PackedStorage.of_tensors("")
        try:
            stored = storage.write(packed)
            self._check(stored)
        except Exception as error:
            raise KernelError(
                f"Packing {packing.label!r} of {self._sites[number][0]} cannot be written: {in_words(error)}",
                remedy="pin a provider of other packings, or load the model without an export",
            ) from error
        if self._shared[0] != number:
            self._shared = number, {}
        entry: dict[str, Any] = {"tensors": {}}
        if stored.facts:
            entry["facts"] = dict(stored.facts)
        for field, tensor in stored.tensors.items():
            key = (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape))
            name, found, _ = self._shared[1].get(key) or self._append(f"{number}.{packing.label}.{field}", tensor)
            self._shared[1][key] = name, found, tensor  # held, so that its address stays its own
            entry["tensors"][field] = [name, found]
        self._weights.setdefault(number, {})[packing.label] = entry

    def _check(self, stored: StoredWeight) -> None:
        json.dumps(dict(stored.facts))
        for field, tensor in stored.tensors.items():
            if tensor.dtype not in NAMES or not tensor.is_contiguous():
                raise KernelError(f"its {field} is {tensor.dtype} with strides {tensor.stride()}")

    def _append(self, name: str, tensor: torch.Tensor) -> tuple[str, int, torch.Tensor]:
        if not self._files or not self._files[-1].has_space(name):
            if self._files:
                self._files[-1].close()
            self._files.append(_TensorFile(self.folder / f"weights-{len(self._files) + 1:05d}{SUFFIX}"))
        self.nbytes += tensor.numel() * tensor.element_size()
        return name, self._files[-1].write(name, tensor.detach().to(HOST)), tensor

    def close(self) -> str:
        """Finish the files, write the layout, and return its SHA-256 in hexadecimal digits."""
        if self._files:
            self._files[-1].close()
        content = {
            "files": [file.path.name for file in self._files],
            "sites": {site: number for number in sorted(self._weights) for site in self._sites[number]},
            "weights": {str(number): entry for number, entry in self._weights.items()},
        }
        text = json.dumps(content, indent=1) + "\n"
        (self.folder / LAYOUT).write_text(text, encoding="utf-8")
        return hashlib.sha256(text.encode()).hexdigest()


def number_weights(weights: Iterable[tuple[str, Any]]) -> tuple[dict[int, int], dict[int, list[str]]]:
    """Numbers of weights by their ids, and the places of each number, from `(place, weight)` of each use."""
    numbers: dict[int, int] = {}
    sites: dict[int, list[str]] = {}
    for site, weight in weights:
        number = numbers.setdefault(id(weight), len(numbers))
        sites.setdefault(number, []).append(site)
    return numbers, sites
