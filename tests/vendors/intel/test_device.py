"""What the backend asks the extension about a device, and what it does about releases with another schema."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inferplane.ops.draw import Draw
from inferplane_xpu.intel import chips, processors
from inferplane_xpu.intel.backend import IntelBackend
from inferplane_xpu.intel.kernels import attention
from tests.vendors.intel.emulated import EMULATOR

assert EMULATOR.libraries, "the operators are there"


def test_the_extension_says_whether_its_matrix_kernels_run(monkeypatch):
    assert chips.matrix_kernels(0).present is True
    monkeypatch.setattr(chips, "xpu", SimpleNamespace(is_xe2_arch=lambda i: False, is_xe3_arch=lambda i: False))
    assert chips.matrix_kernels(0).present is False
    monkeypatch.undo()
    assert torch.ops._xpu_C.is_xe3_arch(0) is False


def test_memory_is_the_extensions_where_torch_does_not_tell(monkeypatch):
    def fail(index):
        raise RuntimeError("The device doesn't support querying the available free memory")

    monkeypatch.setattr(torch.xpu, "mem_get_info", fail)
    backend = IntelBackend()
    backend._extension = True
    memory = backend.memory()
    assert (memory.free_bytes, memory.total_bytes) == (11 << 30, 12 << 30)


def test_releases_without_scales_of_queries_are_called_without(monkeypatch):
    """What releases before 0.1.14 register has one argument less."""
    known = torch.ops._vllm_fa2_C.varlen_fwd.default._schema
    older = torch._C.parse_schema(str(known).replace("Tensor? q_scale, ", ""))
    assert len(older.arguments) == len(known.arguments) - 1
    given = []

    class Operator:
        default = SimpleNamespace(_schema=older)

        def __call__(self, *args):
            given.append(args)
            return [torch.zeros(1)]

    monkeypatch.setattr(attention, "flash", SimpleNamespace(varlen_fwd=Operator()))
    attention._scales.cache_clear()
    try:
        q, at = torch.zeros(1, 2, 64), attention.Sequences(*torch.zeros(3, 2, dtype=torch.int32), 1, 1)
        attention.varlen(q, q, q, at, 1.0)
    finally:
        monkeypatch.undo()
        attention._scales.cache_clear()
    assert len(given[0]) == len(older.arguments)
    assert given[0][[a.name for a in older.arguments].index("softmax_scale")] == 1.0


@pytest.mark.parametrize("residual", [False, True], ids=["first", "sum"])
def test_what_is_left_for_processors(residual):
    """The norms that are registered for another device, on the schemas that the wheel for processors stated."""
    draw = Draw(2, torch.float32)
    x, add, weight = draw.normal(3, 64), draw.normal(3, 64) if residual else None, draw.normal(64)
    norm = SimpleNamespace(weight=weight, eps=1e-6)
    y, total = processors.add_rms_norm(SimpleNamespace(norm=norm), x, add)
    want = x if add is None else x + add
    assert torch.allclose(total, want)
    assert torch.allclose(y, torch.nn.functional.rms_norm(want, (64,), weight, 1e-6), atol=1e-5)
