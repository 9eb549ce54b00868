"""What all storages of whole blocks do alike, however blocks look inside: copy, export and load them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from inferplane.errors import UsageError
from inferplane.types import HOST, LayerKV


class BlockedKV(LayerKV):
    """A `LayerKV` in tensors whose first dimension is the block, so that a block is a row of each.

    A layout of one's own says how tokens lie in a block, by `write` and `read`, and what it consists of, by `stored`.
    """

    @abstractmethod
    def stored(self) -> Sequence[torch.Tensor]:
        """Everything that is kept, entries and scales: tensors or views `[blocks, ...]`. Blocks behind those that the
        block tables name, for padding, may be among them.
        """

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `LayerKV.copy_blocks`: `[n]` block numbers to `[n]`."""
        for part in self.stored():
            part[target.long()] = part[source.long()]

    def export(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `LayerKV.export`; what `stored` has, in its order, as it lies: each `[n, ...]`."""
        return tuple(part[blocks.long()].to(HOST) for part in self.stored())

    def load(self, blocks: torch.Tensor, stored: tuple[torch.Tensor, ...]) -> None:
        """See `LayerKV.load`; each `[n, ...]`. Nothing is written before every shape is known to fit."""
        own = self.stored()
        want = [(len(blocks), *part.shape[1:]) for part in own]
        have = [tuple(t.shape) for t in stored]
        if have != want:
            raise UsageError(
                f"KV layout {self.layout} cannot load tensors of shapes {have}.",
                there_is=f"room for {want}",
                remedy="load only what the same layout exported",
            )
        for part, t in zip(own, stored, strict=True):
            part[blocks.long()] = t.to(part.device)
