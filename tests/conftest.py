"""What holds for every test here: no network, one thread, fixed seeds, and a header that prints what was used."""

from __future__ import annotations

import importlib.metadata
import os
import platform

# Set before anything imports torch, which reads them once. `make test` sets the first three too; this serves a bare
# `pytest`.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",  # a spinning worker takes the core from its neighbour
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # a vendor's half-installed extension must not decide whether tests start
    "NO_COLOR": "1",
}.items():
    os.environ.setdefault(_name, _value)

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run: a failure is there for everybody, and no run fails by chance.
settings.register_profile(
    "inferplane", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", settings.get_profile("inferplane"), max_examples=2000, derandomize=False)
settings.load_profile("inferplane")


def pytest_report_header() -> str:
    versions = []
    for name in ("torch", "transformers", "numpy", "pluggy", "inferplane"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    return f"{', '.join(versions)}; {platform.machine()}, {os.cpu_count()} cores"


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
