"""Checks each available KV layout against a plain dictionary, by random sequences of write, read, copy, export, load.

A slot is `block * block_tokens + offset`. A slot holds what was last written to it: a write changes no other slot, a
row with slot -1 is ignored, and copying or exporting and loading preserves blocks. A write to the first slot of a span
(`KVLayout.span`) may change the others of the span, which are written after it. Values are read as they were
written, within the precision that the layout declares (`KVLayout.tolerance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inferplane.binding.case_caches import round_trip_error
from inferplane.conformance.plugin import SUBJECT
from inferplane.conformance.subject import Subject
from inferplane.ops.oracle import to_host
from inferplane.types import HOST, KVLayout, KVRequest

REQUESTS = {
    "gqa": KVRequest("gqa", 2, 64, 64),
    "gqa_odd": KVRequest("gqa", 3, 33, 33),
    "gqa_k_v_differ": KVRequest("gqa", 2, 48, 32),
    "mla": KVRequest("mla", 1, 512 + 64),
}
BLOCKS = 5
SEEDS = st.integers(0, 2**31)
ORDERS = st.permutations(range(BLOCKS))
SETTINGS = settings(
    max_examples=15,
    stateful_step_count=15,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True)
class LayoutCase:
    request: KVRequest
    layout: KVLayout
    dtype: torch.dtype
    id: str


def cases(subject: Subject) -> list[LayoutCase]:
    return [
        LayoutCase(request, layout, dtype, f"{layout.name}/{label}/{name}")
        for name, dtype in subject.dtypes.items()
        for label, request in REQUESTS.items()
        for layout in subject.layouts(request, dtype)
    ]


def pytest_generate_tests(metafunc):
    ids = (lambda c: c.id) if metafunc.function is test_behaves_like_a_dictionary else (lambda c: f"{c.id}/declared")
    metafunc.parametrize("case", cases(metafunc.config.stash[SUBJECT]), ids=ids)


class KVMachine(RuleBasedStateMachine):
    """Random operations on one layer's cache; hypothesis chooses them and shortens a sequence that fails.

    `model` holds the values of each slot as they were read after the last write to it, one `[slots, ...]` per tensor of
    `KVRequest.entry_shapes`. `machine` makes a subclass with the case and the device.
    """

    case: LayoutCase
    device: str

    def __init__(self) -> None:
        super().__init__()
        self.kv = self.case.layout.build(self.case.request, BLOCKS, self.case.dtype, torch.device(self.device))
        self.block_tokens = self.case.layout.block_tokens
        self.num_slots = BLOCKS * self.block_tokens
        self.shapes = self.case.request.entry_shapes
        self.model: list[torch.Tensor] = []
        self.exported: tuple[list[int], tuple[torch.Tensor, ...], list[torch.Tensor]] | None = None

    # -- helpers

    def on_device(self, numbers: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype).to(self.device)

    def slots_of(self, blocks: list[int]) -> torch.Tensor:
        """Every slot of these blocks, in order."""
        return (torch.tensor(blocks)[:, None] * self.block_tokens + torch.arange(self.block_tokens)).flatten()

    def write_random(self, slots: list[int], seed: int, strided: bool) -> None:
        """Write random rows; they must be read as written, within the layout's precision. Slot -1 is padding."""
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for shape in self.shapes:
            wide = torch.randn(len(slots), *shape[:-1], shape[-1] + 7 * strided, generator=generator) * 3
            rows.append(wide.to(self.case.dtype)[..., : shape[-1]])
        self.kv.write(self.on_device(slots), *(values.to(self.device) for values in rows))
        written = [row for row, slot in enumerate(slots) if slot >= 0]
        at = torch.tensor(slots, dtype=torch.int64)[written]
        changed = self.case.layout.find_dependents(at)
        for model, values, stored in zip(self.model, rows, self.read_all(), strict=True):
            for slot, row in zip(at.tolist(), written, strict=True):
                self.check_rounding(slot, values[row].float(), stored[slot])
            model[changed] = stored[changed]

    def check_rounding(self, slot: int, written: torch.Tensor, stored: torch.Tensor) -> None:
        assert torch.isfinite(stored).all(), f"slot {slot} holds NaN or infinity after it was written"
        share = round_trip_error(self.case.layout, self.case.dtype)
        error, allowed = (written - stored).abs().max().item(), share * written.abs().max().item()
        assert error <= allowed, f"slot {slot}: written and read differ by {error:.3g}, allowed {allowed:.3g}"

    def read_blocks(self, table: list[int], tokens: int, padding: int = 0) -> tuple[torch.Tensor, ...]:
        """Read through a block table that ends with `padding` entries of 0, which belong to no sequence."""
        found = tuple(self.kv.read(self.on_device([*table, *([0] * padding)], torch.int32), tokens))
        expected, shapes = [(tokens, *shape) for shape in self.shapes], [tuple(t.shape) for t in found]
        assert shapes == expected, f"read gives shapes {shapes} instead of {expected}"
        out: tuple[torch.Tensor, ...] = to_host(found, widen=True)
        return out

    def read_all(self) -> tuple[torch.Tensor, ...]:
        return self.read_blocks(list(range(BLOCKS)), self.num_slots)

    def check_same(self, found: torch.Tensor, model: torch.Tensor, what: str, words: str) -> None:
        if not torch.equal(found, model):
            rows = torch.where((found != model).flatten(1).any(1))[0].tolist()
            raise AssertionError(f"{what} {rows[0]} of {len(model)} (blocks of {self.block_tokens}): {words}")

    # -- operations

    @initialize(seed=SEEDS)
    def fill(self, seed: int) -> None:
        self.model = [torch.zeros(self.num_slots, *shape) for shape in self.shapes]
        self.write_random(list(range(self.num_slots)), seed, False)

    @rule(data=st.data(), padding=st.integers(0, 3), seed=SEEDS, strided=st.booleans())
    def write(self, data: st.DataObject, padding: int, seed: int, strided: bool) -> None:
        """Scattered slots, with rows of padding among them."""
        one_slot = st.integers(0, self.num_slots - 1)
        slots = data.draw(st.lists(one_slot, min_size=1, max_size=9, unique=True))
        self.write_random([*slots[:1], *([-1] * padding), *slots[1:]], seed, strided)

    @rule(padding=st.integers(1, 5), seed=SEEDS)
    def write_padding(self, padding: int, seed: int) -> None:
        self.write_random([-1] * padding, seed, False)

    @rule(data=st.data(), order=ORDERS, padding=st.integers(0, 3))
    def read(self, data: st.DataObject, order: list[int], padding: int) -> None:
        tokens = data.draw(st.integers(1, self.num_slots))
        table = order[: -(-tokens // self.block_tokens)]
        for found, model in zip(self.read_blocks(table, tokens, padding), self.model, strict=True):
            self.check_same(found, model[self.slots_of(table)[:tokens]], "token", "read through a block table")

    @rule(order=ORDERS, count=st.integers(1, BLOCKS // 2))
    def copy_blocks(self, order: list[int], count: int) -> None:
        source, target = order[:count], order[count : 2 * count]
        self.kv.copy_blocks(self.on_device(source), self.on_device(target))
        for model in self.model:
            model[self.slots_of(target)] = model[self.slots_of(source)]

    @rule(order=ORDERS, count=st.integers(1, BLOCKS))
    def export(self, order: list[int], count: int) -> None:
        blocks = order[:count]
        stored = tuple(self.kv.export(self.on_device(blocks)))
        assert all(t.device.type == HOST for t in stored), "export gives tensors that are not on the host"
        self.exported = blocks, tuple(t.clone() for t in stored), [m[self.slots_of(blocks)] for m in self.model]

    @precondition(lambda self: self.exported is not None)
    @rule(order=ORDERS)
    def load(self, order: list[int]) -> None:
        """Load the last export, which may be old, into other blocks."""
        assert self.exported is not None
        blocks, stored, values = self.exported
        target = order[: len(blocks)]
        self.kv.load(self.on_device(target), stored)
        for model, exported in zip(self.model, values, strict=True):
            model[self.slots_of(target)] = exported

    @rule(order=ORDERS, load_order=ORDERS, count=st.integers(2, BLOCKS))
    def export_and_load(self, order: list[int], load_order: list[int], count: int) -> None:
        self.export(order, count)
        self.load(load_order)

    @precondition(lambda self: self.exported is not None)
    @rule()
    def load_refuses_other_shapes(self) -> None:
        assert self.exported is not None
        blocks, stored, _ = self.exported
        with pytest.raises(Exception):  # noqa: B017 - a UsageError by preference, and torch's own will do
            self.kv.load(self.on_device(blocks), tuple(t[..., :-1] for t in stored))

    @invariant()
    def nothing_else_changed(self) -> None:
        for found, model in zip(self.read_all() if self.model else (), self.model, strict=True):
            self.check_same(found, model, "slot", "changed without a write to it")


def machine(case: LayoutCase, device: str) -> type[KVMachine]:
    """The machine of one layout on a torch device, as a class that hypothesis makes instances of."""
    return type("Machine", (KVMachine,), {"case": case, "device": device})


def test_behaves_like_a_dictionary(case, device):
    """Write, read, copy, export and load, in any order."""
    run_state_machine_as_test(machine(case, device.backend.torch_device_indexed), settings=SETTINGS)


def test_is_what_it_declares(case, device):
    """Name, block size and bytes of a built layer are those of its layout."""
    layout, request = case.layout, case.request
    kv = layout.build(request, BLOCKS, case.dtype, torch.device(device.backend.torch_device_indexed))
    assert (kv.layout, kv.block_tokens, kv.request) == (layout.name, layout.block_tokens, request)
    declared = layout.bytes_per_block(request, case.dtype)
    one, two = (_bytes(kv.export(torch.arange(n).to(device.backend.torch_device_indexed))) for n in (1, 2))
    assert one <= declared, f"a block is exported as {one} bytes, but bytes_per_block declares {declared}"
    assert two == 2 * one, f"one block is exported as {one} bytes, two as {two}"
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(dict(vars(kv)))}
    taken = sum(storages.values())
    assert taken <= (BLOCKS + 1) * declared, (
        f"{BLOCKS} blocks take {taken} bytes, but each is declared to take {declared}"
    )


def _bytes(stored) -> int:
    return sum(t.numel() * t.element_size() for t in stored)


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return [t for v in value.values() for t in _tensors(v)] if isinstance(value, dict) else []
