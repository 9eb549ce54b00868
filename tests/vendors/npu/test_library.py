"""torch-npu's own package beside this backend, without CANN and over the stubs; run by `make test-vendors`.

Each case is a process of its own, because what is under test is what an import does to it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
STUBS = REPOSITORY / "build" / "vendors" / "npu" / "stubs"
SOURCES = [REPOSITORY / "core", *(REPOSITORY / "backends" / name for name in ("npu", "cpu"))]

if importlib.util.find_spec("torch_npu") is None:
    pytest.skip("not run: torch-npu is in .venv-npu (make test-vendors)", allow_module_level=True)


def python(code: str, *, stubs: bool, autoload: bool = False) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, SOURCES))
    if stubs:
        variables["LD_LIBRARY_PATH"] = str(STUBS)
    if not autoload:
        variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)


def test_the_trap_is_there():
    """Why TORCH_DEVICE_BACKEND_AUTOLOAD=0 is in every remedy: without CANN plain `import torch` fails."""
    done = python("import torch", stubs=False, autoload=True)
    assert done.returncode and "Failed to load the backend extension: torch_npu" in done.stderr
    assert python("import torch", stubs=False).returncode == 0


def test_without_cann_it_is_broken_and_nothing_else_is():
    done = python(
        """
import sys
from inferplane_npu.backend import NpuBackend
from inferplane_cpu.backend import CpuBackend
probe = NpuBackend.probe()
assert probe.presence.value == "broken", probe
assert "CANN is not" in probe.reason and "torch-npu 2.13.0 is installed" in probe.reason, probe
assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in probe.remedy, probe
assert "torch_npu" not in sys.modules
import torch
state = CpuBackend().open()
assert (torch.ones(2, device=state.torch_device) * 2).sum() == 4
""",
        stubs=False,
    )
    assert done.returncode == 0, done.stderr


def test_stubs_do_not_pass_for_an_npu(tmp_path):
    """They count a device and answer every question; the allocation in `open()` tells."""
    (tmp_path / "davinci0").touch()
    done = python(
        f"""
from inferplane.plugin import DeviceError
from inferplane_npu import backend
backend.DEVICE_NODES = {str(tmp_path / "davinci[0-9]*")!r}
probe = backend.NpuBackend.probe()
assert probe.available, probe
try:
    backend.NpuBackend().open()
except DeviceError as error:
    print("REFUSED", error)
""",
        stubs=True,
    )
    assert "REFUSED Device 'npu' cannot be used" in done.stdout, done.stdout + done.stderr
