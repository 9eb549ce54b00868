"""The GPU check's own code, on a machine without one: its cases are right, its parts run through."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import cases, check, parts, peers
from inferplane.plugin import HOST, DeviceState, Features, Memory
from inferplane_cuda.backend import CudaBackend


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """The interpreter in the GPU's place: every kernel that needs no more than Triton."""
    state = DeviceState(HOST, "interpreter", "none", Features(["triton", "fp8", "int8-dot"]), Memory(1, 1))
    monkeypatch.setattr(CudaBackend, "open", lambda self: state)
    monkeypatch.setattr(cases, "DEVICE", HOST)
    monkeypatch.setattr(parts, "copies_for", lambda nbytes: 2)
    monkeypatch.setattr(parts, "timed", lambda calls: (float(len([call() for call in calls])), "graph"))
    monkeypatch.setattr(parts, "roofs", lambda: {"copy_gbps": 4000.0, "bf16_tflops": 800.0})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(peers, "dense", lambda op, sequences, *, few: {})


@pytest.mark.parametrize(
    ("op", "sequences"),
    [
        (cases.absorbed(4), [(2, 70), (1, 0)]),
        (cases.expanded(2), [(9, 60)]),
        (cases.attention(8, 2, 32, "few", 20), [(1, 90), (3, 5)]),
        (cases.attention(8, 2, 32, "many"), [(20, 60)]),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_kernels_are_judged(op, sequences):
    rows = list(parts._judge(op, sequences, torch.Generator().manual_seed(1)))
    assert {row["kv"] for row in rows} == set(cases.kinds(op))
    assert {row["kernel"].partition(":")[0] for row in rows} - {"triton_8bit"} == {"triton", "torch_sdpa"}
    assert ("triton_8bit:mla_expanded" in {row["kernel"] for row in rows}) == (op.name == "mla_expanded")
    assert all(row["passed"] for row in rows), rows
    assert check.faults("correct", rows) == []
    rows[0]["passed"] = False
    assert len(check.faults("correct", rows)) == 1


def test_tables_are_made(monkeypatch):
    monkeypatch.setattr(parts, "MLA_SHAPES", {"a": (4, 2, [70, 130])})
    made = {"mla": list(parts.mla())}
    rows = [row for row in made["mla"] if "shape" in row]
    assert {(row["kernel"], row["kv"]) for row in rows} == {
        ("triton:mla_absorbed whole op", "auto"),
        ("triton:mla_absorbed whole op", "fp8"),
    }
    assert all(row["us"] == 2.0 and row["share_of_roof"] > 0 for row in rows)
    assert check.table(made).count("\n") == 2 + len(rows)


def test_a_kernel_that_fails_is_a_row_and_a_fault(monkeypatch):
    def broken(calls):
        raise RuntimeError("misaligned address")

    monkeypatch.setattr(parts, "timed", broken)
    op = cases.attention(8, 2, 32, "few")
    rows = list(parts._attention_rows("decode", op, [(1, 70)], "auto", 1e6, parts.roofs()))
    assert [row["error"] for row in rows] == ["RuntimeError: misaligned address"]
    assert "misaligned address" in check.faults("gqa", rows)[0]
    assert "misaligned address" in check.table({"gqa": rows})


def test_a_kernel_that_raises_costs_its_own_row(monkeypatch):
    def broken(op, kernel, ctx, weight):
        raise ValueError("out of resource: shared memory")

    monkeypatch.setattr(cases, "view", broken)
    rows = list(parts._judge(cases.attention(8, 2, 32, "few"), [(1, 70)], torch.Generator().manual_seed(1)))
    assert len(rows) > 1 and all(row["error"].endswith("shared memory") and not row["passed"] for row in rows)
    assert len(check.faults("correct", rows)) == len(rows)
    op = cases.attention(8, 2, 32, "few")
    rows = list(parts._attention_rows("decode", op, [(1, 70)], "auto", 1e6, parts.roofs()))
    assert [row["error"] for row in rows] == ["RuntimeError: ValueError: out of resource: shared memory"]


def test_every_piece_is_tried(monkeypatch):
    monkeypatch.setattr(parts, "ROUNDS", 1)
    tried = []
    judged = lambda op, sequences, generator: tried.append((op.name, sequences[0][0] <= 8)) or [{"passed": True}]  # noqa: E731
    monkeypatch.setattr(parts, "_judge", judged)
    assert set(check.PIECES) == set(parts.PIECES)
    for piece in check.PIECES:
        assert "seed" in next(iter(rows := list(parts.PARTS[f"correct.{piece}"]()))) and len(rows) > 1
    wanted = [("mla_absorbed", True)] * 2 + [("mla_expanded", False)] + [("attention", True), ("attention", False)] * 2
    assert tried == wanted
    assert set(check.LIMITS_S) - {"correct", "conformance"} <= set(parts.PARTS)
