"""What the backend asks the extension about a device, and what it does about releases with another schema."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inferplane.ops.draw import Draw
from inferplane.types.batch import Query, make_batch
from inferplane_xpu.intel import chips, processors
from inferplane_xpu.intel.backend import IntelBackend
from inferplane_xpu.intel.kernels import attention, lengths, mla, when
from inferplane_xpu.intel.kvcache import BLOCK_TOKENS
from tests.vendors.intel import chip
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
    attention._query_scales.cache_clear()
    try:
        q, at = torch.zeros(1, 2, 64), attention.AttentionSequences(*torch.zeros(3, 2, dtype=torch.int32), 1, 1)
        attention.varlen(q, q, q, at, 1.0)
        fp8 = q.to(torch.float8_e4m3fn)
        attention.varlen(q, fp8, fp8, at, 1.0, scales=(torch.tensor([0.5]), torch.tensor([2.0])))
    finally:
        monkeypatch.undo()
        attention._query_scales.cache_clear()
    plain, in_fp8 = (dict(zip([a.name for a in older.arguments], args, strict=True)) for args in given)
    assert plain["softmax_scale"] == in_fp8["softmax_scale"] == 1.0
    assert plain["k_scale"] is plain["v_scale"] is None
    assert (in_fp8["k_scale"].item(), in_fp8["v_scale"].item()) == (0.5, 2.0)


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


def test_sequences_are_computed_once_per_step():
    queries = [Query([1, 2, 3], 4, [0], 1), Query([1], 70, [1, 2], 1)]
    batch, other = (make_batch(queries, block_tokens=64, device="cpu") for _ in range(2))
    made = lengths.single_tokens(batch, 2)
    assert made.lens.tolist() == [5, 5, 6, 6, 7, 7, 71, 71]
    assert made.tables[:, 0].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert made.query_start.tolist() == list(range(9)) and made.max_query_tokens == 1
    assert lengths.single_tokens(batch, 2) is made
    assert lengths.single_tokens(batch).lens.tolist() == [5, 6, 7, 71], "other kernels take other groups"
    assert lengths.single_tokens(replace(batch), 2) is not made, "a graph is recorded from a copy"
    assert lengths.single_tokens(other, 2) is not lengths.single_tokens(batch, 2)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 20], ids=["whole", "window"])
def test_what_is_said_to_be_compiled_is_what_the_wheel_holds(window, sinks):
    """At the sizes themselves; heads of more than 256 entries are latents."""
    local, sizes = window is not None, range(8, 257, 8)
    many, single = (chip.SINK_PREFILL, chip.SINK_DECODE) if sinks else (chip.PREFILL, chip.DECODE)
    prefill = {size for size in sizes if (size, True, not local, local) in many}
    assert {size for size in sizes if when.is_prefill_compiled(size, window, sinks=sinks)} == prefill
    for group, tile in ((1, 8), (8, 8), (9, 16), (64, 16)):
        decode = {size for size in sizes if (tile, size, BLOCK_TOKENS, local) in single}
        assert {size for size in sizes if when.is_decode_compiled(size, group, window, sinks=sinks)} == decode
    assert (when.LATENT_HEADS, mla.LATENT + mla.ROTATED, BLOCK_TOKENS, False) in chip.DECODE
    assert not any(tile > when.LATENT_HEADS and size > 512 for tile, size, _, _ in chip.DECODE)
    dense = {size for size in sizes if (size, False, True, False) in chip.PREFILL}
    assert set(mla.EXPANDED_WIDTHS) == dense
