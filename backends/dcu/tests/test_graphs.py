"""Capture on stand-ins for torch.cuda's streams and graphs that note what is asked of them."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from inferplane_dcu.backend import DcuBackend
from inferplane_dcu.graphs import WARM_UPS


def test_steps_are_warmed_up_aside_and_recorded_once(monkeypatch):
    log, results = [], object()
    side = SimpleNamespace(name="side", wait_stream=lambda s: log.append(f"side waits for {s.name}"))
    main = SimpleNamespace(name="main", wait_stream=lambda s: log.append(f"main waits for {s.name}"))
    recorded = SimpleNamespace(pool=lambda: "pool", replay=lambda: log.append("replayed"))

    @contextmanager
    def on(stream):
        log.append(f"on {stream.name}")
        yield
        log.append("off")

    @contextmanager
    def graph(made, pool):
        log.append(f"records into {pool}")
        yield
        log.append("recorded")

    for name, value in {
        "Stream": lambda: side, "current_stream": lambda: main, "stream": on, "CUDAGraph": lambda: recorded,
        "graph": graph,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)

    def step(batch):
        log.append(batch)
        return results

    backend = DcuBackend()
    made = backend.capture(step, "bucket")
    assert log == [
        "side waits for main", "on side", *["bucket"] * WARM_UPS, "off", "main waits for side", "records into None",
        "bucket", "recorded",
    ]  # fmt: skip
    assert made.replay() is results and log[-1] == "replayed"
    backend.capture(step, "larger")
    assert log[-3:] == ["records into pool", "larger", "recorded"], "one pool for all sizes"
