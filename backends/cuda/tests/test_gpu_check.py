"""`make gpu-check` where there is no GPU: its clock on pretended events, its parts as processes, models on the host."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import cases, check, measure, parts, peers
from inferplane.plugin import HOST


class Clock:
    """Events that tell 100 us for each call since the last one; a graph replays what was recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: str = "") -> None:
        self.calls, self.refuses = 0, refuses
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = clock.calls

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) * 0.1

        class Graph:
            def replay(self) -> None:
                clock.calls += self.recorded

        class Recording(nullcontext):
            def __init__(self, graph: Graph, stream: Any) -> None:
                super().__init__()
                self.graph, self.begun = graph, clock.calls

            def __exit__(self, *error: object) -> None:
                if clock.refuses:
                    raise RuntimeError(clock.refuses)
                self.graph.recorded, clock.calls = clock.calls - self.begun, self.begun

        properties = SimpleNamespace(L2_cache_size=50 << 20)
        for name, stand_in in {
            "Event": Event, "CUDAGraph": Graph, "graph": Recording, "Stream": object, "stream": nullcontext,
            "synchronize": lambda: None, "get_device_properties": lambda i: properties,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def call(self) -> None:
        self.calls += 1


def test_calls_are_timed_in_a_graph(monkeypatch):
    clock = Clock(monkeypatch)
    assert measure.timed([clock.call, clock.call]) == (pytest.approx(100.0), "graph")
    assert [measure.copies_for(n) for n in (1 << 30, 100 << 20, 1)] == [1, 2, 64]


def test_what_cannot_be_recorded_is_timed_as_it_is_and_says_so(monkeypatch):
    clock = Clock(monkeypatch, "CUDA error: operation not permitted when stream is capturing")
    assert measure.timed([clock.call, clock.call]) == (pytest.approx(100.0), "eager")
    clock.refuses = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure.timed([clock.call])


def test_roofs(monkeypatch):
    monkeypatch.setattr(measure, "DEVICE", HOST)
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "MATRIX", 64)
    monkeypatch.setattr(measure, "microseconds", lambda calls: [call() for call in calls] and 10.0)
    assert measure.roofs() == {
        "copy_gbps": pytest.approx(209.7, rel=1e-3),
        "bf16_tflops": pytest.approx(0.0524, rel=1e-2),
        "fp8_tflops": pytest.approx(0.0524, rel=1e-2),
    }


def test_peers_are_asked_as_they_are_called(monkeypatch):
    """Stand-ins for the libraries, with the signatures that are recorded of them."""
    from backends.cuda.tests.test_providers import published

    flash, attn, infer = ModuleType("flash_mla"), ModuleType("flash_attn_interface"), ModuleType("flashinfer")
    flash.get_mla_metadata = lambda *given: ("plan", None)  # type: ignore[attr-defined]
    flash.flash_mla_with_kvcache = published("flash_mla.flash_mla_with_kvcache", lambda given: "mla")  # type: ignore[attr-defined]
    attn.flash_attn_func = lambda q, k, v, causal: q.shape  # type: ignore[attr-defined]
    path = "flashinfer.mla.BatchMLAPagedAttentionWrapper"
    members = {
        "__init__": published(path, lambda given: None), "plan": published(path, lambda given: None, "plan"),
        "run": published(path, lambda given: "infer", "run"),
    }  # fmt: skip
    infer.mla = ModuleType("flashinfer.mla")  # type: ignore[attr-defined]
    infer.mla.BatchMLAPagedAttentionWrapper = type("Wrapper", (), members)
    for name, module in {"flash_mla": flash, "flash_attn_interface": attn, "flashinfer": infer,
                         "flashinfer.mla": infer.mla}.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    launch = ModuleType("launch")
    launch.fold_query = lambda view, q_nope, q_rope: (torch.randn(4 * 2, 576), None)  # type: ignore[attr-defined]
    launch.launch_mla = lambda q, heads, scale, batch, kv: "ours"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "inferplane_cuda.kernels.hopper.mla_launch", launch)
    import inferplane_cuda.kernels.hopper as hopper

    monkeypatch.setattr(hopper, "mla_launch", launch, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    monkeypatch.setattr(cases, "DEVICE", HOST)
    monkeypatch.setattr(peers, "DEVICE", HOST)
    op = cases.absorbed(2)
    batch, blocks = cases.step([(2, 70), (2, 5)], torch.Generator().manual_seed(1))
    found = peers.latent(op, (None, None), None, batch, cases.filled(op.kv, blocks))
    assert {name: call() for name, call in found.items()} == {
        "gluon:attend": "ours", "flash_mla": "mla", "flashinfer": "infer"
    }  # fmt: skip
    dense = peers.dense(cases.attention(4, 2, 32, "many"), [(9, 0)] * 2, few=False)
    assert [call() is not None for call in dense.values()] == [True, True]
    monkeypatch.delattr(infer.mla.BatchMLAPagedAttentionWrapper, "plan")
    broken = peers.latent(op, (None, None), None, batch, cases.filled(op.kv, blocks))["flashinfer"]
    with pytest.raises(RuntimeError, match=r"AttributeError: .*plan"):
        broken()
    row = {"shape": "a", "kernel": "flashinfer", "kv": "auto", "peer": True, "error": "AttributeError"}
    assert check.faults("mla", [row]) == [] and len(check.faults("mla", [{**row, "peer": False}])) == 1


def test_models_run_replayed_and_eager(monkeypatch):
    """On the host nothing is recorded, and that is a fault where it was to be."""
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    few = {"vocab_size": 300, "intermediate_size": 64, "num_hidden_layers": 1, "hidden_size": 128}
    models = {
        name: ({**model, **few} if isinstance(model, dict) else model, options, recorded)
        for name, (model, options, recorded) in parts.MODELS.items()
    }
    monkeypatch.setattr(parts, "MODELS", models)
    rows = list(parts.engine())
    assert {row["model"] for row in rows} == {"demo", "dense", "latent", "latent, Gluon", "latent, MTP", "demo, MTP"}
    wrong = check.faults("engine", rows)
    assert len(wrong) == 5 and sum("recorded and replayed" in w for w in wrong) == 3
    assert [w for w in wrong if "verification and drafts were one record" in w]
    assert [w for w in wrong if "gluon" in w]
    assert sum(row.get("what", "").startswith("replayed and eager") and row["passed"] for row in rows) == 5


GOOD = "import json, sys; open(sys.argv[1], 'w').write(json.dumps([{'passed': True}]))"
CUT = "import sys, time; open(sys.argv[1] + '.part', 'w').write('[{\"n\": 1}]'); print('went on', flush=True); "


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """Runs the check with processes of ours in place of its own."""
    code: dict[str, str] = {}
    monkeypatch.setattr(check, "LIMITS_S", {"correct": 5, "engine": 5, "mla": 5})
    monkeypatch.setattr(check, "PIECES", ("a", "b"))
    monkeypatch.setattr(check, "missing", lambda names: [])
    monkeypatch.setattr(check, "versions", lambda: {"torch": "2"})
    whole = check.commands

    def commands(part: str, result: Any) -> dict[Any, list[str]]:
        files = whole(part, result)
        return {file: [sys.executable, "-c", code.get(file.stem, GOOD), str(file)] for file in files}

    monkeypatch.setattr(check, "commands", commands)

    def main(*given: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["check.py", "--out", str(tmp_path), *given])
        status = check.main()
        return status, json.loads(next(tmp_path.glob("gpu-check-*.json")).read_text())

    main.code, main.out = code, tmp_path  # type: ignore[attr-defined]
    return main


def test_what_is_done_is_not_run_again(processes):
    processes.code["correct.b"] = CUT + "sys.exit('no kernel image')"
    status, report = processes()
    assert status == 1 and report["wrong"] == ["correct: correct.b: exit status 1: went on; no kernel image"]
    assert report["parts"]["correct"] == [{"passed": True}, {"n": 1}] and report["parts"]["mla"] == [{"passed": True}]
    processes.code |= {name: "raise SystemExit('ran again')" for name in ("correct.a", "engine", "mla")}
    processes.code["correct.b"] = GOOD
    status, report = processes()
    assert status == 0 and report["wrong"] == [] and report["parts"]["correct"] == [{"passed": True}] * 2
    status, report = processes("--again", "--only", "mla")
    assert status == 1 and "ran again" in report["wrong"][0] and "mla" not in report["parts"]


def test_a_part_that_does_not_end_is_ended_with_all_its_workers(processes, monkeypatch):
    pid = processes.out / "pid"
    worker = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    processes.code["mla"] = CUT + f"import subprocess; subprocess.run([sys.executable, '-c', {worker!r}])"
    monkeypatch.setitem(check.LIMITS_S, "mla", 3)
    status, report = processes("--only", "mla")
    assert status == 1 and report["wrong"] == ["mla: mla: no end within 3 s"] and report["parts"]["mla"] == [{"n": 1}]
    for _ in range(100):
        try:
            os.kill(int(pid.read_text()), 0)
        except ProcessLookupError:
            break
        time.sleep(0.02)
    else:
        pytest.fail("the worker lives on")


def test_versions_are_told():
    assert check.versions()["torch"] == torch.__version__ and check.versions()["python"]


def test_without_time_nothing_is_begun(processes):
    status, report = processes("--budget", "1")
    assert status == 1 and report["parts"] == {} and all("no time left" in w for w in report["wrong"])


def test_what_is_missing_is_told_before_anything_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == "msgspec" else object())
    monkeypatch.setattr(sys, "argv", ["check.py", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        check.main()
    assert "lacks msgspec; nothing was run" in capsys.readouterr().err and not (tmp_path / "out").exists()
    monkeypatch.setattr(sys, "argv", ["check.py", "--only", "mla,speed"])
    with pytest.raises(SystemExit):
        check.main()
    assert "no part speed; there are correct, engine" in capsys.readouterr().err
