"""The check's matrix products, on a machine without a GPU: every call runs, and computes what it is said to compute."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import cases, check, parts, products
from inferplane.errors import KernelError
from inferplane.kernels.triton.experts.blocks import assign_masked_blocks
from inferplane.plugin import HOST, DeviceState, Features, Memory
from inferplane_cuda.backend import CudaBackend


@pytest.fixture(autouse=True)
def host(monkeypatch):
    state = DeviceState(HOST, "interpreter", "none", Features(["triton", "fp8"]), Memory(1, 1))
    monkeypatch.setattr(CudaBackend, "open", lambda self: state)
    monkeypatch.setattr(cases, "DEVICE", HOST)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(parts, "copies_for", lambda nbytes: 1)
    monkeypatch.setattr(parts, "timed", lambda calls: (float(len([call() for call in calls])), "graph"))
    monkeypatch.setattr(parts, "roofs", lambda: {"copy_gbps": 4000.0, "bf16_tflops": 800.0, "fp8_tflops": 1500.0})
    monkeypatch.setattr(products, "DENSE", ((136, 256),))
    monkeypatch.setattr(products, "ROWS", (1, 80))
    monkeypatch.setattr(products, "EXPERTS", ((3, 20, 72, 256),))


@pytest.mark.parametrize("part", ["gemm", "experts"])
def test_rows_are_made(part):
    rows = list(parts.PARTS[part]())
    ours = [row for row in rows[1:] if not row["peer"]]
    assert ours and all(row["us"] == 1.0 and row["floor_us"] >= 0 for row in ours), ours
    assert {row["kv"] for row in ours} >= {"fp8_block", "int4_group", "int4_group64", "int8_row"}
    assert check.table({part: rows}).count("\n") == 1 + len(rows)
    assert part in check.LIMITS_S


def test_dense_calls_agree_with_one_another():
    torch.manual_seed(5)
    calls = products.dense_calls(80, 136, 256, "fp8_block")
    want = calls["torch bf16"]().float()
    for name in ("triton:product core", "triton_fp8:linear_fp8"):
        assert (calls[name]().float() - want).abs().max() <= 0.06 * want.abs().max(), name


@pytest.mark.parametrize(("format", "linear"), [("int4_group64", "fp8:linear_fp8"), ("int8_row", "int8:linear_int8")])
def test_dense_calls_with_coded_activations_agree(format, linear):
    torch.manual_seed(5)
    calls = products.dense_calls(80, 136, 256, format)
    before, whole = calls[f"triton:product core {format}"]().float(), calls[f"triton_{linear}"]().float()
    assert torch.equal(before, whole) and before.abs().max() > 10


def test_masked_blocks_are_of_one_expert():
    with pytest.raises(KernelError, match="32 rows an expert in blocks of 64"):
        assign_masked_blocks(torch.zeros(3, dtype=torch.int32), 32, 64)
