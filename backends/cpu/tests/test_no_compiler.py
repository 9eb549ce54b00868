"""Where there is no compiler the installation goes on, and what is left out says why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferplane_cpu import native as module
from inferplane_cpu.native import native

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        (
            {"CXX": "no-such-compiler"},
            "there is no C++ compiler called 'no-such-compiler'; install one, or name it in CXX",
        ),
        ({"CXX": "false"}, "false failed: exit status 1"),
        ({"INFERPLANE_NO_NATIVE": "1"}, "INFERPLANE_NO_NATIVE was set when Inferplane was installed"),
    ],
    ids=["none", "broken", "unwanted"],
)
def test_building_goes_on_and_leaves_the_reason(variables, reason, tmp_path, monkeypatch):
    """What `pip install` runs for the native kernels; the note lies where the library would."""
    pytest.importorskip("setuptools")
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        tmp_path,
        "--build-temp",
        tmp_path / "temp",
    ]
    environment = {**os.environ, "INFERPLANE_NO_NATIVE": "", **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = tmp_path / "inferplane_cpu"
    assert not list(built.glob("_native*"))
    assert (built / "native.txt").read_text().strip() == reason

    monkeypatch.setattr(module, "__file__", str(built / "native.py"))
    found = native.__wrapped__()
    assert found.library is None and found.feature.present is False and found.tiles.present is False
    assert found.reason == f"the native kernels were not built: {reason}"
