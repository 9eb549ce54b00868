"""Every KV layout on offer against a plain dictionary, through random sequences of write, read, copy, export and load.

A slot is `block * block_tokens + offset`. What a layer remembers of a slot is whatever was last written there: no other
slot may change, a row with slot -1 goes nowhere, blocks keep their contents when copied or exported and loaded. Values
come back as they were written, but for what the layout says of its own precision (`KVLayout.tolerance`).
"""

from __future__ import annotations

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
class Case:
    request: KVRequest
    layout: KVLayout
    dtype: torch.dtype
    id: str


def cases(subject: Subject) -> list[Case]:
    return [
        Case(request, layout, dtype, f"{layout.name}/{label}/{name}")
        for name, dtype in subject.dtypes.items()
        for label, request in REQUESTS.items()
        for layout in subject.layouts(request, dtype)
    ]


def pytest_generate_tests(metafunc):
    ids = (lambda c: c.id) if metafunc.function is test_behaves_like_a_dictionary else (lambda c: f"{c.id}/declared")
    metafunc.parametrize("case", cases(metafunc.config.stash[SUBJECT]), ids=ids)


def parts(request: KVRequest) -> list[tuple[int, ...]]:
    """Shape of each canonical tensor's row."""
    if request.kind == "mla":
        return [(request.dim,)]
    return [(request.heads, request.dim), (request.heads, request.v_dim)]


def machine(case: Case, where: str) -> type[RuleBasedStateMachine]:
    """A class of machines for one layout; hypothesis drives its rules and shortens what fails."""
    size, slots = case.layout.block_tokens, BLOCKS * case.layout.block_tokens
    numbers = st.integers(0, 2**31)
    orders = st.permutations(range(BLOCKS))

    def slots_of(numbers: list[int]) -> torch.Tensor:
        return (torch.tensor(numbers)[:, None] * size + torch.arange(size)).flatten()

    class Machine(RuleBasedStateMachine):
        """`model` holds each slot's values as they were read after they were last written, `[slots, ...]` a part."""

        def __init__(self) -> None:
            super().__init__()
            self.kv = case.layout.build(case.request, BLOCKS, case.dtype, torch.device(where))
            self.model: list[torch.Tensor] = []
            self.exported: tuple[list[int], tuple[torch.Tensor, ...], list[torch.Tensor]] | None = None

        def put(self, wanted: list[int], seed: int, strided: bool) -> None:
            """Write random rows; they must come back as written, within the layout's precision."""
            generator = torch.Generator().manual_seed(seed)
            fresh = []
            for shape in parts(case.request):
                wide = torch.randn(len(wanted), *shape[:-1], shape[-1] + 7 * strided, generator=generator) * 3
                fresh.append(wide.to(case.dtype)[..., : shape[-1]])
            self.kv.write(torch.tensor(wanted, dtype=torch.int64).to(where), *(f.to(where) for f in fresh))
            rows = [row for row, slot in enumerate(wanted) if slot >= 0]
            real = torch.tensor([wanted[row] for row in rows], dtype=torch.int64)
            share = case.layout.tolerance + torch.finfo(case.dtype).eps / 2 if case.layout.tolerance else 0.0
            for model, f, held in zip(self.model, fresh, self.everything(), strict=True):
                for row, slot in zip(rows, real.tolist(), strict=True):
                    w, h = f[row].float(), held[slot]
                    assert torch.isfinite(h).all(), f"slot {slot} holds NaN or infinity after it was written"
                    error, allowed = (w - h).abs().max().item(), share * w.abs().max().item()
                    assert error <= allowed, (
                        f"slot {slot}: written and read differ by {error:.3g}, allowed {allowed:.3g}"
                    )
                model[real] = held[real]

        def look(self, table: list[int], tokens: int, behind: int = 0) -> tuple[torch.Tensor, ...]:
            """Read through a block table with `behind` entries of 0 behind the sequence's blocks."""
            found = tuple(self.kv.read(torch.tensor([*table, *([0] * behind)], dtype=torch.int32).to(where), tokens))
            want, have = [(tokens, *s) for s in parts(case.request)], [tuple(t.shape) for t in found]
            assert have == want, f"read gives shapes {have} instead of {want}"
            out: tuple[torch.Tensor, ...] = to_host(found, widen=True)
            return out

        def everything(self) -> tuple[torch.Tensor, ...]:
            return self.look(list(range(BLOCKS)), slots)

        @initialize(seed=numbers)
        def fill(self, seed: int) -> None:
            self.model = [torch.zeros(slots, *shape) for shape in parts(case.request)]
            self.put(list(range(slots)), seed, False)

        @rule(
            wanted=st.lists(st.integers(0, slots - 1), min_size=1, max_size=9, unique=True),
            padding=st.integers(0, 3),
            seed=numbers,
            strided=st.booleans(),
        )
        def write(self, wanted: list[int], padding: int, seed: int, strided: bool) -> None:
            """Scattered slots, with rows of padding among them."""
            self.put([*wanted[:1], *([-1] * padding), *wanted[1:]], seed, strided)

        @rule(padding=st.integers(1, 5), seed=numbers)
        def write_nothing(self, padding: int, seed: int) -> None:
            self.put([-1] * padding, seed, False)

        @rule(order=orders, tokens=st.integers(1, slots), behind=st.integers(0, 3))
        def read(self, order: list[int], tokens: int, behind: int) -> None:
            table = order[: -(-tokens // size)]
            for held, model in zip(self.look(table, tokens, behind), self.model, strict=True):
                same(held, model[slots_of(table)[:tokens]], "token", "read through a block table")

        @rule(order=orders, count=st.integers(1, BLOCKS // 2))
        def copy_blocks(self, order: list[int], count: int) -> None:
            source, target = order[:count], order[count : 2 * count]
            self.kv.copy_blocks(torch.tensor(source).to(where), torch.tensor(target).to(where))
            for model in self.model:
                model[slots_of(target)] = model[slots_of(source)]

        @rule(order=orders, count=st.integers(1, BLOCKS))
        def export(self, order: list[int], count: int) -> None:
            chosen = order[:count]
            stored = tuple(self.kv.export(torch.tensor(chosen).to(where)))
            assert all(t.device.type == HOST for t in stored), "export gives tensors that are not on the host"
            self.exported = chosen, tuple(t.clone() for t in stored), [m[slots_of(chosen)] for m in self.model]

        @precondition(lambda self: self.exported is not None)
        @rule(into=orders)
        def load(self, into: list[int]) -> None:
            """What was exported, perhaps long ago, into other blocks."""
            assert self.exported is not None
            chosen, stored, kept = self.exported
            self.kv.load(torch.tensor(into[: len(chosen)]).to(where), stored)
            for model, values in zip(self.model, kept, strict=True):
                model[slots_of(into[: len(chosen)])] = values

        @rule(order=orders, into=orders, count=st.integers(2, BLOCKS))
        def export_and_load(self, order: list[int], into: list[int], count: int) -> None:
            self.export(order, count)
            self.load(into)

        @precondition(lambda self: self.exported is not None)
        @rule()
        def load_refuses_other_shapes(self) -> None:
            assert self.exported is not None
            chosen, stored, _ = self.exported
            with pytest.raises(Exception):  # noqa: B017 - a UsageError by preference, and torch's own will do
                self.kv.load(torch.tensor(chosen).to(where), tuple(t[..., :-1] for t in stored))

        @invariant()
        def nothing_else_changed(self) -> None:
            for held, model in zip(self.everything() if self.model else (), self.model, strict=True):
                same(held, model, "slot", "changed although nobody wrote there")

    def same(held: torch.Tensor, model: torch.Tensor, what: str, words: str) -> None:
        if not torch.equal(held, model):
            rows = torch.where((held != model).flatten(1).any(1))[0].tolist()
            raise AssertionError(f"{what} {rows[0]} of {len(model)} (blocks of {size}): {words}")

    return Machine


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
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(vars(kv))}
    held = sum(storages.values())
    assert held <= (BLOCKS + 1) * declared, (
        f"{BLOCKS} blocks take {held} bytes, but each is declared to take {declared}"
    )


def _bytes(stored) -> int:
    return sum(t.numel() * t.element_size() for t in stored)


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return [t for v in value.values() for t in _tensors(v)] if isinstance(value, dict) else []
