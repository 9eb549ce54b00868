"""Looks up tensors by name: what the sources of all file formats have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import torch

from inferplane.models.reading.safetensors_header import Entry

AnyEntry = TypeVar("AnyEntry", bound=Entry)


class EntriesByName(Generic[AnyEntry]):
    """The lookups of a `TensorSource`; its constructor fills `_entries`."""

    _entries: Mapping[str, AnyEntry]

    def names(self) -> Iterable[str]:
        """See `TensorSource.names`."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource.shape`."""
        entry = self._entries.get(name)
        return None if entry is None else entry.shape

    def dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource.dtype`; float32 of values that are packed in blocks."""
        entry = self._entries.get(name)
        return None if entry is None else entry.dtype

    def main_dtype(self) -> torch.dtype | None:
        """The dtype of 16 or more bits in which most bytes of the tensors are stored; None if there is none."""
        sizes: Counter[torch.dtype] = Counter()
        for _, entry in self._floats():
            sizes[entry.dtype] += entry.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype], default=None)

    def _floats(self) -> Iterator[tuple[str, AnyEntry]]:
        """The tensors with a dtype of 16 or more bits, by name."""
        return ((n, e) for n, e in self._entries.items() if e.dtype.is_floating_point and e.dtype.itemsize > 1)
