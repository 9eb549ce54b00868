"""The conformance case of captures finds graphs that replay wrongly, on a device that captures by recording a call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.conformance import test_captures as suite
from inferplane.conformance.configs import TINY
from inferplane.conformance.subject import Subject
from inferplane.plugins import DeviceEntry
from inferplane_cpu.backend import CpuBackend
from tests.unit.engine.runner.test_capture import Record
from tests.unit.support.subjects import PROBE


class LeavesResults(Record):
    def replay(self):
        first, self.replay = Record.replay(self), lambda: first
        return first


class HoldsIds(Record):
    def __init__(self, step, bucket):
        ids = bucket.ids.clone()
        super().__init__(lambda batch: step(replace(batch, ids=ids)), bucket)


class HoldsLengths(Record):
    def __init__(self, step, bucket):
        lengths = bucket.seq_lens.clone()
        super().__init__(lambda batch: step(replace(batch, seq_lens=lengths)), bucket)


class HoldsSlots(Record):
    def __init__(self, step, bucket):
        slots = bucket.slots.clone()
        super().__init__(lambda batch: step(replace(batch, slots=slots)), bucket)


class HoldsTables(Record):
    def __init__(self, step, bucket):
        tables = bucket.block_tables.clone()
        super().__init__(lambda batch: step(replace(batch, block_tables=tables)), bucket)


def run(graph, name: str) -> dict:
    """What the case measures on the cpu's kernels, with this kind of graph."""

    class Capturing(CpuBackend):
        def capture(self, step, bucket):
            return graph and graph(step, bucket)

    backend = Capturing()
    kernels = [replace(kernel, capture_safe=True) for kernel in backend.kernels()]
    entry = DeviceEntry("cpu", "made", "1.0", None, PROBE, backend.torch_device, 0, False)
    found: dict = {}
    device = Subject(backend, entry, kernels, {"float32": torch.float32})
    suite.test_captured_steps((name, "float32"), device, lambda **facts: found.update(facts))
    return found


@pytest.mark.parametrize("name", TINY)
def test_right_captures_of_every_model_pass(name):
    found = run(Record, name)
    assert found["error"] <= found["tolerance"]


@pytest.mark.parametrize("graph", [LeavesResults, HoldsIds, HoldsLengths, HoldsSlots, HoldsTables])
def test_wrong_captures_are_found(graph):
    with pytest.raises(AssertionError, match="captures are not what was captured"):
        run(graph, next(iter(TINY)))


def test_devices_that_capture_nothing_do_not_run_it():
    with pytest.raises(pytest.skip.Exception, match="the device captures no steps"):
        run(None, next(iter(TINY)))


def test_kernels_that_cannot_be_captured_are_named():
    backend = CpuBackend()
    entry = DeviceEntry("cpu", "made", "1.0", None, PROBE, backend.torch_device, 0, False)
    kernels = [replace(kernel, capture_safe=False) for kernel in backend.kernels()]
    with pytest.raises(pytest.skip.Exception, match="cannot be captured"):
        suite.test_captured_steps(
            (next(iter(TINY)), "float32"), Subject(backend, entry, kernels, {"float32": torch.float32}), None
        )
