"""The start-up check of a KV layout, before kernels are judged on it: a wrong layout is not blamed on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.binding.case_caches import round_trip_error
from inferplane.errors import in_words
from inferplane.types import HOST, KVLayout, KVRequest, LayerKV

BLOCKS = 4
SEED = 0


def check_layout(layout: KVLayout, request: KVRequest, dtype: torch.dtype, device: str) -> str:
    """In words, what a layout does wrongly on the opened device; empty if nothing.

    A slot holds what was last written to it, whatever the order of writes and of the block table; a row with slot -1
    writes nothing; writing, copying and loading change no other slot, but for those of a span (`KVLayout.span`); NaN in
    one block reaches no other.

    Args:
        layout: to check, on a cache of `BLOCKS` blocks.
        request: the entries of a layer.
        dtype: of the plan.
        device: torch's name of it.
    """
    try:
        kv = layout.build(request, BLOCKS, dtype, torch.device(device))
        return _Check(kv, layout, request, dtype, device).run()
    except Exception as error:
        return f"it raised {in_words(error)}"


class _Check:
    def __init__(self, kv: LayerKV, layout: KVLayout, request: KVRequest, dtype: torch.dtype, device: str) -> None:
        self.kv, self.layout, self.shapes, self.dtype, self.device = kv, layout, request.entry_shapes, dtype, device
        self.size, self.slots = kv.block_tokens, BLOCKS * kv.block_tokens
        self.generator = torch.Generator().manual_seed(SEED)

    def run(self) -> str:
        entries = self.kv.request.entries_per_block(self.layout.block_tokens)
        covered = self.kv.covered_tokens or self.size
        if (self.size, covered) != (entries, self.layout.block_tokens):
            return f"its blocks have {self.size} entries for {covered} tokens instead of {entries} for " + (
                f"{self.layout.block_tokens}"
            )
        order = torch.randperm(self.slots, generator=self.generator)
        rows = self._draw(self.slots)
        self._write(order, [r[order] for r in rows])
        for table in ([0, 1, 2, 3], [2, 0, 3, 1]):
            slots = self._slots_of(table)
            for got, want in zip(self._read(table), rows):
                if wrong := self._rounding(got, want[slots], slots):
                    return wrong
        return self._boundaries_and_padding() or self._short_table() or self._move_blocks() or self._nan()

    def _boundaries_and_padding(self) -> str:
        boundaries = torch.tensor([self.size - 1, self.size, self.slots - 1])
        before, rows = self._read_all(), self._draw(5)
        self._write(torch.cat((torch.tensor([-1]), boundaries, torch.tensor([-1]))), rows)
        stored = self._read_all()
        for got, want in zip(stored, rows):
            if wrong := self._rounding(got[boundaries], want[1:4], boundaries):
                return wrong
        others = torch.ones(self.slots, dtype=torch.bool)
        others[self.layout.find_dependents(boundaries)] = False
        return self._same(stored, before, others, "writing to the ends of blocks, with padded rows (slot -1), changed")

    def _short_table(self) -> str:
        """A table may end with entries of 0 that belong to no sequence."""
        whole, tokens = self._read([2, 1]), self.size + 1
        short = self._read([2, 1, 0, 0], tokens)
        return self._same(
            short, [t[:tokens] for t in whole], slice(None), "reading fewer tokens than a table's changed"
        )

    def _move_blocks(self) -> str:
        before = self._read_all()
        self.kv.copy_blocks(self._numbers([0]), self._numbers([2]))
        self.kv.load(self._numbers([3]), self.kv.export(self._numbers([1])))
        return self._same(
            self._read_all(), [t[self._slots_of([0, 1, 0, 1])] for t in before], slice(None), "copying moved"
        )

    def _nan(self) -> str:
        before, block = self._read_all(), self._slots_of([1])
        self._write(block, [t * torch.nan for t in self._draw(self.size)])
        others = torch.ones(self.slots, dtype=torch.bool)
        others[block] = False
        return self._same(self._read_all(), before, others, "NaN in another block changed")

    # -- helpers

    def _numbers(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self.device)

    def _slots_of(self, table: Sequence[int]) -> torch.Tensor:
        return (torch.tensor(table)[:, None] * self.size + torch.arange(self.size)).flatten()

    def _draw(self, rows: int) -> list[torch.Tensor]:
        return [torch.randn(rows, *shape, generator=self.generator).to(self.dtype) for shape in self.shapes]

    def _write(self, slots: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        self.kv.write(slots.to(self.device), *(t.to(self.device) for t in rows))

    def _read(self, table: Sequence[int], tokens: int | None = None) -> list[torch.Tensor]:
        found = self.kv.read(self._numbers(table).int(), len(table) * self.size if tokens is None else tokens)
        return [t.to(HOST, copy=True).float() for t in found]

    def _read_all(self) -> list[torch.Tensor]:
        return self._read(range(BLOCKS))

    def _rounding(self, got: torch.Tensor, want: torch.Tensor, slots: torch.Tensor) -> str:
        if got.shape != want.shape:
            return f"reading gives {list(got.shape)} instead of {list(want.shape)}"
        error = (got - want.float()).abs().flatten(1).amax(1)
        bad = ~(error <= round_trip_error(self.layout, self.dtype) * want.float().abs().flatten(1).amax(1))
        if not bad.any():
            return ""
        i = int(bad.int().argmax())
        block, offset = divmod(int(slots[i]), self.size)
        return f"token {offset} of block {block} was read with an error of {error[i]:.3g} of what was written"

    def _same(
        self, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], where: torch.Tensor | slice, words: str
    ) -> str:
        for one, other in zip(got, want):
            bad = (one[where] != other[where]).flatten(1).any(1)
            if bad.any():
                index = int(torch.arange(len(one))[where][int(bad.int().argmax())])
                return f"{words} token {index % self.size} of block {index // self.size}"
        return ""
