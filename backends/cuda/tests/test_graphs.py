"""How steps are recorded, on pretended streams and graphs: warmed up on a stream of its own, one pool for all sizes."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inferplane_cuda.graphs import WARM_UPS, Graphs


@pytest.fixture
def told(monkeypatch):
    """What was done, in order."""
    done: list[Any] = []

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: done.append(f"{name} waits for {other.name}"))

    class Graph:
        def pool(self) -> str:
            return "pool"

        def replay(self) -> None:
            done.append("replay")

    @contextmanager
    def on(made: Any) -> Any:
        done.append(f"on {made.name}")
        yield
        done.append(f"off {made.name}")

    @contextmanager
    def recording(graph: Any, pool: Any) -> Any:
        done.append(f"record with {pool}")
        yield

    current = stream("main")
    for name, stand_in in {
        "Stream": lambda: stream("side"), "current_stream": lambda: current, "stream": on, "CUDAGraph": Graph,
        "graph": recording,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return done


def test_a_step_is_warmed_up_then_recorded_into_one_pool(told):
    graphs, bucket = Graphs(), object()

    def step(batch: Any) -> str:
        assert batch is bucket
        told.append("step")
        return "results"

    first = graphs.record(step, bucket)  # type: ignore[arg-type]
    warm = ["side waits for main", "on side", *["step"] * WARM_UPS, "off side", "main waits for side"]
    assert told == [*warm, "record with None", "step"]
    told.clear()
    graphs.record(step, bucket)  # type: ignore[arg-type]
    assert told == [*warm, "record with pool", "step"]
    told.clear()
    assert first.replay() == "results" and told == ["replay"]


def test_a_step_that_cannot_be_recorded_says_so_and_leaves_no_pool(told):
    graphs = Graphs()

    def step(batch: Any) -> None:
        if "record with None" in told:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="capturing"):
        graphs.record(step, None)  # type: ignore[arg-type]
    assert graphs._pool is None
