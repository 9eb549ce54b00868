"""Copies, exports and loads whole blocks of a cache, whatever a block looks like inside."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from inferplane.renamed import old_attributes, warn_of_old_name
from inferplane.types import HOST, LayerKV

Zeros = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]
"""Makes a tensor of zeros: shape, dtype, device."""


def make_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On the host the system zeroes memory when it is first touched, so an unused cache costs nothing."""
    if device.type != HOST:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


@old_attributes({"stored": "list_tensors"})
class BlockedKV(LayerKV):
    """A `LayerKV` whose tensors have the block as their first dimension, so that a block is one row of each tensor.

    A subclass defines how tokens lie in a block (`write` and `read`) and lists its tensors (`list_tensors`).
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Take the method under its name of 0.1, `stored`, too."""
        super().__init_subclass__(**options)
        if "stored" in vars(cls):
            warn_of_old_name(f"{cls.__name__}.stored", "list_tensors")
            cls.list_tensors = cls.stored  # type: ignore[method-assign,attr-defined]

    @abstractmethod
    def list_tensors(self) -> Sequence[torch.Tensor]:
        """All tensors of the cache, entries and scales, or views of them: `[blocks, ...]`. They may contain more blocks
        than block tables refer to, for padding.
        """

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `LayerKV.copy_blocks`: `[n]` block numbers to `[n]`."""
        for part in self.list_tensors():
            part[target.long()] = part[source.long()]

    def export(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.export`; one tensor `[n, ...]` for each tensor of `list_tensors`, in the same order."""
        return tuple(part[blocks.long()].to(HOST) for part in self.list_tensors())

    def load(self, blocks: torch.Tensor, stored: tuple[torch.Tensor, ...]) -> None:
        """See `LayerKV.load`; each tensor is `[n, ...]`. All shapes are checked before anything is written."""
        own = self.list_tensors()
        self._check_shapes(stored, [(len(blocks), *part.shape[1:]) for part in own])
        for part, t in zip(own, stored, strict=True):
            part[blocks.long()] = t.to(part.device)
