"""The check's decode steps where there is no GPU: its sums on pretended kernels, its models on the host."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import cases, check, decode
from benchmarks.shapes import FP8, REAL
from inferplane_cpu.backend import CpuBackend

ROOF = {"copy_gbps": 10.0, "bf16_tflops": 0.1}
SMALL = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 300, "max_position_embeddings": 128,
}  # fmt: skip
KERNELS = [("gemm", 0.0, 10.0), ("norm", 12.0, 14.0), ("gemm", 13.0, 20.0)]


def test_idle_time_is_what_no_kernel_covers():
    assert decode.summary(KERNELS) == {"kernels": 3, "busy_us": 18.0, "idle": 0.1}
    assert decode.summary([]) == {"kernels": 0}
    assert list(decode.by_kernel(KERNELS)) == [
        {"kernel": "gemm", "times": 2, "kernel_us": 17.0},
        {"kernel": "norm", "times": 1, "kernel_us": 2.0},
    ]
    many = [(f"k{i}", i * 10.0, i * 10.0 + i + 1) for i in range(decode.MOST_KERNELS + 2)]
    *_, last = decode.by_kernel(many)
    assert last == {"kernel": "all others", "times": 2, "kernel_us": 3.0}, "nothing is left out of the sum"


class Replayed:
    def __init__(self, step, bucket):
        self.step, self.bucket = step, bucket

    def replay(self):
        return self.step(self.bucket)


@pytest.fixture
def host(monkeypatch):
    replays = []
    safe = [replace(kernel, capture_safe=True) for kernel in CpuBackend().kernels()]
    monkeypatch.setattr(CpuBackend, "kernels", lambda self: safe)
    monkeypatch.setattr(CpuBackend, "capture", lambda self, step, bucket: Replayed(step, bucket))
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(decode, "CONTEXT", 32)
    monkeypatch.setattr(decode, "REPLAYS", 2)
    monkeypatch.setattr(decode, "REAL", {"a": {**decode.REAL["Qwen3-8B"], **SMALL}})
    monkeypatch.setattr(decode, "STEPS", {"a": 2})
    monkeypatch.setattr(decode, "replay_us", lambda replay: replays.append(replay()) or 100.0)
    monkeypatch.setattr(decode, "profiled", lambda replay: replays.append(replay()) or KERNELS)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    return replays


def test_steps_are_told(host):
    rows = list(decode.decode(ROOF))
    assert {row["step"] for row in rows} == {"a, bf16", "a, bf16, ahead", "a, FP8", "a, FP8, ahead", "a, transformers"}
    assert not [row for row in rows if "error" in row], rows
    whole = [row for row in rows if "sum_of_floors_us" in row]
    assert len(whole) == 4 and all(row["us"] == 100.0 and row["idle"] == 0.1 for row in whole)
    for row in whole:  # op by op takes at least as long as all bytes at once
        assert row["sum_of_floors_us"] >= 0.99 * row["floor_us"] > 0
    assert all(torch.isfinite(t).all() for results in host for t in results)
    peers = [row for row in rows if row.get("peer")]
    assert [row["mode"] for row in peers] == ["eager", "compiled"] and all(row["times"]["bf16"] > 0 for row in peers)
    assert check.faults("decode", rows) == [] and decode.AHEAD not in os.environ
    text = check.steps_table(rows)
    assert "| a, FP8 | 100.0 |" in text and "| a, bf16 | gemm | 2 | 17.0 |" in text


@pytest.fixture
def drafting(host, monkeypatch):
    """A small model with an MTP layer, steps of which are timed on the host."""
    few = {
        "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 128, "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "vocab_size": 300, "max_position_embeddings": 128,
    }  # fmt: skip
    monkeypatch.setattr(decode, "REAL", {"b": {**REAL["DeepSeek-V3, 4 layers"], **few}})
    monkeypatch.setattr(decode, "DRAFTING", (("b", 2, 2),))
    monkeypatch.setattr(decode, "TURNS", 3)
    return host


def test_steps_with_drafts_are_told_in_both_ways(drafting):
    rows = list(decode.drafting())
    assert not [row for row in rows if "error" in row], rows
    assert {row["step"] for row in rows} == {"b, 2 x 2 drafts"}
    timed = {row["mode"]: row["step_us"] for row in rows if "mode" in row}
    assert list(timed) == ["apart", "one record"] and min(timed.values()) > 0
    assert [row["passed"] for row in rows if "passed" in row] == [True] and check.faults("drafting", rows) == []
    (whole,) = (row for row in rows if "us" in row)
    assert whole["us"] == 100.0 and whole["sequences"] == 2
    assert [tuple(table.shape) for (table,) in drafting] == [(2, 2 + 3 + 2)] * 2, "the record of both sequences"
    text = check.steps_table(rows)
    assert (
        "| b, 2 x 2 drafts apart |" in text
        and "| b, 2 x 2 drafts one record |" in text
        and "| b, 2 x 2 drafts | gemm | 2 |" in text
    )


def test_drafts_that_are_not_in_the_record_are_a_fault(drafting, monkeypatch):
    monkeypatch.setattr(CpuBackend, "capture", lambda self, step, bucket: None)
    wrong = check.faults("drafting", list(decode.drafting()))
    assert len(wrong) == 1 and "not one record: the device captures no steps" in wrong[0]


def test_what_fails_is_a_row_and_a_fault(host, monkeypatch):
    def broken(replay):
        raise RuntimeError("misaligned address")

    monkeypatch.setattr(decode, "replay_us", broken)
    monkeypatch.setattr(decode, "FORMS", {"FP8": FP8})
    rows = list(decode.decode(ROOF))
    assert [row["error"] for row in rows if "error" in row] == ["RuntimeError: misaligned address"] * 2
    assert len(check.faults("decode", rows)) == 2 and "misaligned address" in check.steps_table(rows)
    monkeypatch.setattr(CpuBackend, "capture", lambda self, step, bucket: None)
    rows = list(decode.told("a", lambda: decode.ours(decode.REAL["a"], 2, ROOF)))
    assert rows == [{"step": "a", "passed": False, "error": "the step was not recorded: the device captures no steps"}]
