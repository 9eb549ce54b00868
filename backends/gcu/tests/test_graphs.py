"""Capture on a stand-in for torch.gcu that notes what is asked of it."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from inferplane_gcu.graphs import WARM_UPS, Graphs


class Runtime:
    """What of torch.gcu a capture uses."""

    def __init__(self):
        self.log = []
        self.Stream = lambda: SimpleNamespace(
            name="side", wait_stream=lambda s: self.log.append(f"side waits for {s.name}")
        )
        self.main = SimpleNamespace(name="main", wait_stream=lambda s: self.log.append(f"main waits for {s.name}"))
        self.GCUGraph = lambda: SimpleNamespace(pool=lambda: "pool", replay=lambda: self.log.append("replayed"))

    def current_stream(self):
        return self.main

    @contextmanager
    def stream(self, stream):
        self.log.append(f"on {stream.name}")
        yield
        self.log.append("off")

    @contextmanager
    def graph(self, graph, pool):
        self.log.append(f"records into {pool}")
        yield
        self.log.append("recorded")


def test_steps_are_warmed_up_aside_and_recorded_once():
    runtime, graphs, results = Runtime(), Graphs(), object()

    def step(batch):
        runtime.log.append(batch)
        return results

    graph = graphs.record(runtime, step, "bucket")
    assert runtime.log == [
        "side waits for main", "on side", *["bucket"] * WARM_UPS, "off", "main waits for side", "records into None",
        "bucket", "recorded",
    ]  # fmt: skip
    assert graph.replay() is results and runtime.log[-1] == "replayed"
    graphs.record(runtime, step, "larger")
    assert runtime.log[-3:] == ["records into pool", "larger", "recorded"], "one pool for all sizes"
