"""The state machine of KV layouts finds each fault that a layout may have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, settings

from inferplane.conformance import test_kvcache as suite
from inferplane.kvcache import PagedKV
from inferplane.types import KVLayout
from tests.unit.support.subjects import subject


class NoSpareSlot(PagedKV):
    def write(self, slots, *values):
        super().write(torch.where(slots < 0, self.blocks * self.block_tokens - 1, slots), *values)


class WritesNeighbour(PagedKV):
    def write(self, slots, *values):
        super().write(torch.where(slots == 7, 8, slots), *values)


class DropsRows(PagedKV):
    def write(self, slots, *values):
        super().write(slots[:5], *(v[:5] for v in values))


class MixesKAndV(PagedKV):
    def read(self, table, tokens):
        found = super().read(table, tokens)
        return found[::-1] if len(found) == 2 and found[0].shape == found[1].shape else (found[0] + 1, *found[1:])


class RoundsWithoutSaying(PagedKV):
    def write(self, slots, *values):
        super().write(slots, *(v.to(torch.float8_e4m3fn).to(v.dtype) for v in values))


class CopiesBackwards(PagedKV):
    def copy_blocks(self, source, target):
        super().copy_blocks(target, source)


class CopiesKOnly(PagedKV):
    def copy_blocks(self, source, target):
        kept = self.entries
        self.entries = kept[:1] if len(kept) > 1 else []
        super().copy_blocks(source, target)
        self.entries = kept


class LoadsElsewhere(PagedKV):
    def load(self, blocks, stored):
        super().load(blocks.flip(0), stored)


class LoadsAnything(PagedKV):
    def load(self, blocks, stored):
        if stored[0].shape[1:] == self.export(blocks)[0].shape[1:]:
            super().load(blocks, stored)


class ReadsTableToItsEnd(PagedKV):
    def read(self, table, tokens):
        return super().read(table.flip(0), tokens)


class ReadsTooMuch(PagedKV):
    def read(self, table, tokens):
        return super().read(table, min(tokens + 1, len(table) * self.block_tokens))


class ChangesWhenRead(PagedKV):
    def read(self, table, tokens):
        found = super().read(table, tokens)
        self.entries[0][3] += 1
        return found


BEHAVIOUR = [
    NoSpareSlot,
    WritesNeighbour,
    DropsRows,
    MixesKAndV,
    RoundsWithoutSaying,
    CopiesBackwards,
    CopiesKOnly,
    LoadsElsewhere,
    LoadsAnything,
    ReadsTableToItsEnd,
    ReadsTooMuch,
    ChangesWhenRead,
]


def layout(kind: type[PagedKV], **changes) -> KVLayout:
    """A layout of four tokens a block that builds this kind of cache."""

    def build(request, blocks, dtype, device):
        return kind(request, blocks, 4, "made_4", dtype, device)

    return replace(KVLayout("made_4", 4, build, lambda r, dtype: 4 * r.entries * dtype.itemsize), **changes)


def cases(offered: KVLayout) -> list[suite.LayoutCase]:
    return suite.cases(subject(layouts=[offered]))


@pytest.mark.parametrize("kind", BEHAVIOUR)
@pytest.mark.parametrize("label", ["gqa_odd", "mla"])
def test_a_faulty_layout_is_found(kind, label, monkeypatch):
    monkeypatch.setattr(suite, "SETTINGS", settings(suite.SETTINGS, phases=[Phase.generate]))  # no time to shorten it
    (case,) = [c for c in cases(layout(kind)) if f"/{label}/" in c.id]
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        suite.test_behaves_like_a_dictionary(case, subject())


def test_a_sound_layout_passes():
    for case in cases(layout(PagedKV)):
        suite.test_behaves_like_a_dictionary(case, subject())
        suite.test_is_what_it_declares(case, subject())


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "another"},
        {"block_tokens": 8},
        {"bytes_per_block": lambda r, dtype: 4 * r.entries * dtype.itemsize - 1},
        {"bytes_per_block": lambda r, dtype: r.entries},
    ],
)
def test_a_false_declaration_is_found(changes):
    for case in cases(layout(PagedKV, **changes)):
        with pytest.raises(AssertionError):
            suite.test_is_what_it_declares(case, subject())
