"""Writes safetensors files tensor by tensor: only one tensor is in memory at a time."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from inferplane.models.reading.checkpoint import INDEX, SINGLE
from inferplane.models.reading.safetensors_header import DTYPES

SHARD_BYTES = 4 * 2**30
"""Most bytes of a file, but for a single larger tensor."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST = {"dtype": "F8_E4M3", "data_offsets": [10**18, 10**18]}


class PlannedTensor(NamedTuple):
    """A tensor that will be written: its name and shape, its largest possible number of bytes, and its dtype where that
    is known before."""

    name: str
    shape: tuple[int, ...]
    max_bytes: int
    dtype: torch.dtype | None = None


class SafetensorsWriter:
    """Writes tensors in the planned order into as many files as they need, and an index if these are several.

    Args:
        folder: exists.
        planned: all tensors, in their order.
        shard_bytes: most bytes of a file.
    """

    def __init__(self, folder: Path, planned: Iterable[PlannedTensor], shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self._where, self.nbytes = folder, dict[str, int](), 0
        self._shards = list(_divide(planned, shard_bytes))

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write all tensors, by name.

        Args:
            tensors: in the planned order.

        Raises:
            OSError: a file cannot be written.
        """
        left = iter(tensors)
        paths = [self._write_shard(number, shard, left) for number, shard in enumerate(self._shards)]
        assert next(left, None) is None, "more tensors than planned"
        if len(paths) == 1:
            paths[0].rename(self.folder / SINGLE)
            return
        titles = [f"model-{n:05d}-of-{len(paths):05d}.safetensors" for n in range(1, len(paths) + 1)]
        for path, title in zip(paths, titles, strict=True):
            path.rename(self.folder / title)
        index = {
            "metadata": {"total_size": self.nbytes},
            "weight_map": {name: titles[n] for name, n in self._where.items()},
        }
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write_shard(self, number: int, shard: list[PlannedTensor], left: Iterator[tuple[str, torch.Tensor]]) -> Path:
        """Write one file. Its header's size is that of the longest header; spaces fill it up."""
        path = self.folder / f"part-{number}.safetensors"
        longest = {planned.name: {**_LONGEST, "shape": planned.shape} for planned in shard}
        size = -(-len(_as_json(longest)) // 8) * 8
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        with open(path, "wb") as file:
            file.write(bytes(8 + size))
            at = 0
            for planned in shard:
                name, tensor = next(left)
                assert (name, tuple(tensor.shape)) == (planned.name, planned.shape), (name, planned)
                data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                file.write(data)
                header[name] = {
                    "dtype": NAMES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [at, at + len(data)],
                }
                at += len(data)
                self._where[name] = number
            written = _as_json(header)
            file.seek(0)
            file.write(struct.pack("<Q", size) + written + b" " * (size - len(written)))
            file.flush()
            os.fsync(file.fileno())
        self.nbytes += at
        return path


def _as_json(entries: Mapping[str, object]) -> bytes:
    return json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()


def _divide(planned: Iterable[PlannedTensor], shard_bytes: int) -> Iterator[list[PlannedTensor]]:
    """The tensors of each file."""
    shard: list[PlannedTensor] = []
    size = 0
    for tensor in planned:
        if shard and size + tensor.max_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.max_bytes
    yield shard


def count_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize
