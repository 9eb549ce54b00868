"""Fixtures of the mock device's tests."""

from __future__ import annotations

import pytest
import torch

from inferplane import plugins
from inferplane.binding import Bench
from tests.mock_device import hidden
from tests.mock_device.mock_device import VARIANTS

PLUGIN = "tests.mock_device.mock_device"


@pytest.fixture
def mock(monkeypatch):
    """The mock's variants beside the cpu backend, as the process's only plugins."""
    if not hidden.supported():
        pytest.skip("not run: this torch takes no devices written in Python (2.9 does)")
    hidden.start()
    host = plugins.discover(f"only,inferplane_cpu.plugin,{PLUGIN}")
    monkeypatch.setattr("inferplane.engine.clients.llm.host", lambda: host)
    return host


def bench_of(device: str, dtype: torch.dtype = torch.float32) -> Bench:
    """Where cases run on a variant of the mock."""
    backend = VARIANTS[device]()
    state = backend.open()
    return Bench(device, state.torch_device, dtype, state.features, lambda request: backend.kv_layouts(request, dtype))
