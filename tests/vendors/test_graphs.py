"""How backends capture steps, on a stand-in for the runtime that notes every call."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from inferplane.kernels.graphs import WARM_UPS, CapturingAccelerator
from inferplane.plugin import Accelerator
from inferplane.plugins import discover
from inferplane.types.batch import Query, make_batch
from inferplane_xpu.kunlun import backend as kunlun
from inferplane_xpu.kunlun.backend import KunlunBackend
from tests.house.rules import IN_TREE

HOST = discover(IN_TREE)
BACKENDS = [type(HOST.backend_for_explain(entry.name)) for entry in HOST.devices()]
RECORDING = [backend for backend in BACKENDS if issubclass(backend, CapturingAccelerator)]
BUCKET, LARGER = (make_batch([Query([1], n, [0])], block_tokens=64, device="cpu") for n in (0, 1))
WARM = ["side waits for main", "on side", *[BUCKET] * WARM_UPS, "off side", "main waits for side"]


class Runtime:
    """What of a device's module in torch a capture uses."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.main = self.named("main")

    def named(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    def Stream(self) -> SimpleNamespace:
        return self.named("side")

    def current_stream(self) -> SimpleNamespace:
        return self.main

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.log.append(f"on {stream.name}")
        yield
        self.log.append(f"off {stream.name}")

    @contextmanager
    def graph(self, graph: Any, pool: Any) -> Any:
        self.log.append(f"{graph.kind} into {pool}")
        yield
        self.log.append("recorded")

    def make(self, kind: str) -> SimpleNamespace:
        return SimpleNamespace(kind=kind, pool=lambda: "pool", replay=lambda: self.log.append("replayed"))


@pytest.fixture
def runtime(monkeypatch):
    """A runtime that every backend takes for its own, with the variable set that Kunlun's wants."""
    made = Runtime()
    for backend in RECORDING:
        monkeypatch.setattr(backend, "runtime", lambda self: made)
    monkeypatch.setenv(kunlun.GRAPHS_SWITCH, "1")
    return made


@pytest.fixture(params=RECORDING, ids=lambda backend: backend.name)
def kind(request, runtime) -> tuple[Accelerator, str]:
    """A backend, and the class of graphs that it records; its runtime has that class."""
    name = request.param.graph_class
    setattr(runtime, name, lambda: runtime.make(name))
    return request.param(), name


def test_steps_are_warmed_up_aside_and_recorded_once_into_one_pool(kind, runtime):
    (backend, name), results = kind, object()

    def step(batch: Any) -> object:
        runtime.log.append(batch)
        return results

    recorded = backend.capture(step, BUCKET)
    assert runtime.log == [*WARM, f"{name} into None", BUCKET, "recorded"]
    assert recorded.replay() is results and runtime.log[-1] == "replayed"
    runtime.log.clear()
    backend.capture(step, BUCKET)
    assert runtime.log == [*WARM, f"{name} into pool", BUCKET, "recorded"]
    runtime.log.clear()
    backend.capture(step, LARGER)
    assert runtime.log[-3:] == [f"{name} into pool", LARGER, "recorded"], "one pool for all sizes"
    recorded.replay()
    assert runtime.log[-1] == "replayed"


def test_what_is_computed_once_a_step_is_computed_within_every_graph(kind):
    """What a warm-up or another graph of the same bucket computed is not updated when this graph is replayed."""
    backend, made = kind[0], []

    def step(batch: Any) -> object:
        return [batch.once("test.lengths", lambda: made.append(batch) or len(made)) for layer in range(3)]

    BUCKET.once("test.lengths", lambda: 0)
    for graph in (1, 2):
        results = backend.capture(step, BUCKET).replay()
        assert len(made) == graph * (WARM_UPS + 1) and results == [len(made)] * 3


def test_a_step_that_cannot_be_recorded_says_so_and_leaves_no_pool(kind, runtime):
    backend, name = kind

    def step(batch: Any) -> None:
        runtime.log.append(batch)
        if f"{name} into None" in runtime.log:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="capturing"):
        backend.capture(step, BUCKET)
    runtime.log.clear()
    backend.capture(lambda batch: None, BUCKET)
    assert f"{name} into None" in runtime.log


@pytest.mark.parametrize("backend", RECORDING, ids=lambda backend: backend.name)
def test_nothing_is_run_where_the_runtime_has_no_graphs(backend, runtime):
    assert backend().capture(lambda batch: pytest.fail("a step was run"), BUCKET) is None
    assert not runtime.log


def test_kunlun_records_where_the_vendors_switch_says_so(runtime, monkeypatch):
    runtime.CUDAGraph = lambda: runtime.make("CUDAGraph")
    for value in ("0", None):
        monkeypatch.delenv(kunlun.GRAPHS_SWITCH) if value is None else monkeypatch.setenv(kunlun.GRAPHS_SWITCH, value)
        assert KunlunBackend().capture(lambda batch: pytest.fail("a step was run"), BUCKET) is None
        assert not runtime.log
