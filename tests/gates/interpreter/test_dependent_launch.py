"""Launches ahead: programs read and write nothing before they have waited, and compute what they would anyway."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from inferplane.binding import run_case
from inferplane.kernels.triton import Products, Tiles, matrix_kernels, triton_kernels
from inferplane.kernels.triton import dependent_launch as module
from inferplane.kernels.triton import matmul as products_module
from inferplane.kernels.triton.matmul import matmul
from inferplane.kernels.triton.matmul_input import make_plain_input
from inferplane.kernels.triton.weight_packing import pack
from inferplane.ops import OPS, encode
from tests.gates.interpreter.benches import bench
from tests.gates.interpreter.test_matrices import PRODUCTS, served

ACCESSES = ("create_load", "create_store", "create_masked_load", "create_masked_store", "create_atomic_rmw")
OFF, AHEAD = PRODUCTS, replace(PRODUCTS, ahead=True)
KERNELS = {
    f"{k.op} {k.provider}": k
    for k in (*matrix_kernels(AHEAD.prepare), *triton_kernels(("paged_64",), Tiles(ahead=True).prepare))
}
NAMES = ("linear triton", "linear triton_fp8", "moe_experts triton_fp8", "moe triton", "moe triton_fp8",
         "moe_route triton", "add_rms_norm triton", "silu_mul triton", "rope triton")  # fmt: skip


class Watch:
    """Programs of launches ahead, in turn: what each does to memory before it has waited, and what it asks for."""

    def __init__(self, patch: Any) -> None:
        self.ahead = self.waited = False
        self.waits, self.early, self.fetched = 0, [], []
        run = GridExecutor.__call__
        patch.setattr(GridExecutor, "__call__", lambda g, *args, **named: self.launch(run, g, args, named))
        patch.setattr(module, "gdc_wait", self.wait)
        patch.setattr(module, "gdc_launch_dependents", self.tell)
        patch.setattr(InterpreterBuilder, "create_inline_asm", lambda b, *asked: self.fetch(*asked))
        begin = InterpreterBuilder.set_grid_idx
        patch.setattr(InterpreterBuilder, "set_grid_idx", lambda b, *at: self.program(begin, b, at))
        for name in ACCESSES:
            self.guard(patch, name)

    def launch(self, run: Any, grid: Any, args: Any, named: Any) -> None:
        self.ahead = named.get("AHEAD", False)
        assert self.ahead == named.get("launch_pdl", False)
        run(grid, *args, **named)

    def program(self, begin: Any, builder: Any, at: Any) -> None:
        self.waited = False
        begin(builder, *at)

    def wait(self) -> None:
        self.waited, self.waits = True, self.waits + 1

    def tell(self) -> None:
        if not self.waited:
            self.early.append("launch_dependents")

    def guard(self, patch: Any, name: str) -> None:
        access = getattr(InterpreterBuilder, name)

        def guarded(builder: Any, *args: Any) -> Any:
            if self.ahead and not self.waited:
                self.early.append(name)
            return access(builder, *args)

        patch.setattr(InterpreterBuilder, name, guarded)

    def fetch(self, asm: str, constraints: str, values: Any, types: Any, pure: bool, pack: int) -> Any:
        assert "prefetch.L2" in asm and not pure
        if self.waited:
            self.early.append("fetched too late")
        address, size = (np.broadcast_to(v.data, values[0].data.shape) for v in values)
        self.fetched += zip(address.tolist(), size.tolist())
        zeros = TensorHandle(np.zeros(address.shape, np.int32), types[0].scalar)
        return type("Made", (), {"get_result": staticmethod(lambda i: zeros)})


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_touched_before_the_wait(name, watch):
    kernel = KERNELS[name]
    samples = [s for s in OPS[kernel.op].samples() if served(kernel, s, torch.bfloat16)]
    outcome = run_case(kernel, samples[0], bench(torch.bfloat16, None), seed=1, poisoned=True)
    assert outcome.served and outcome.passed, outcome.detail
    assert watch.waits and watch.early == []


FORMS = [("fp8_block", 200), ("int8_row", 1160), ("int4_group", 1160), ("int4_group32", 72), ("plain", 328)]


@pytest.mark.parametrize("gate", ["", "silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 20, 70])
@pytest.mark.parametrize(("format", "depth"), FORMS)
def test_results_are_the_same_and_weights_are_fetched(format, depth, rows, gate, watch):
    """Within the weight, but for 15 bytes of alignment on either side; each row's beginning, unless rows are many."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(80, depth, generator=generator).bfloat16()
    packed = pack(weight if format == "plain" else encode(weight, format))
    x = make_plain_input(torch.randn(rows, depth, generator=generator).bfloat16())
    assert torch.equal(matmul(x, packed, AHEAD, gate=gate), matmul(x, packed, OFF, gate=gate))
    if rows > products_module.MAX_PREFETCH_ROWS:
        assert watch.fetched == []
        return
    first, row = packed.data.data_ptr(), packed.data.stride(0) * packed.data.element_size()
    end = first + packed.data.numel() * packed.data.element_size()
    assert all(
        a % 16 == size % 16 == 0 and 0 < size <= products_module.PREFETCH_BYTES_PER_ROW for a, size in watch.fetched
    )
    assert all(first - 16 < a and a + size < end + 16 for a, size in watch.fetched)
    covered = sorted(watch.fetched)
    for place in (first + i * row for i in range(80)):
        assert any(a <= place < a + size for a, size in covered), "a row of which nothing is fetched"


def test_what_is_touched_too_early_is_seen(watch, monkeypatch):
    """The same products without their wait."""
    monkeypatch.setattr(module, "gdc_wait", lambda: None)
    x, weight = make_plain_input(torch.ones(1, 64).bfloat16()), pack(encode(torch.ones(16, 64), "int8_row"))
    matmul(x, weight, AHEAD)
    assert {"create_masked_load", "create_masked_store", "launch_dependents"} <= set(watch.early)


def test_counters_are_touched_after_the_wait(watch):
    """Split along K: what the launch before left in the counters is looked at when that one has ended."""
    products = replace(AHEAD, programs=64)
    x, weight = make_plain_input(torch.ones(1, 2048).bfloat16()), pack(encode(torch.ones(16, 2048), "int8_row"))
    want = matmul(x, weight, replace(products, ahead=False))
    for _ in range(2):
        assert torch.equal(matmul(x, weight, products), want)
    assert watch.waits == 2 * 4 and "create_atomic_rmw" not in watch.early and watch.early == []
    assert isinstance(products, Products) and not products.counters.of(x.data.device, 1).any()
