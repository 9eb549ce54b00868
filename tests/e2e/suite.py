"""Running the conformance suite as a stranger does: in a process of its own, from a folder that is not ours."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from tests.house.rules import REPOSITORY, SOURCE_PATHS

PLUGIN = "inferplane.conformance.plugin"


def environment(*plugins: str, paths: tuple[str, ...] = ()) -> dict[str, str]:
    """This process's environment with these plugin modules and no others, importable from the source tree."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *SOURCE_PATHS, str(REPOSITORY)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "INFERPLANE_PLUGINS": ",".join(["only", "inferplane_cpu.plugin", *plugins]),
        "PYTEST_ADDOPTS": "",
        "COLUMNS": "200",
    }


def options() -> list[str]:
    """How pytest finds the suite's options: by its entry point, or by name where nothing is installed."""
    installed = importlib.metadata.entry_points(group="pytest11")
    return [] if any(point.value == PLUGIN for point in installed) else ["-p", PLUGIN]


def conformance(
    device: str, *more: str, cwd: Path, env: dict[str, str], python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run the suite on a device."""
    command = [python, "-m", "pytest", "--pyargs", "inferplane.conformance", *options(), "--device", device]
    command += ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *more]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)


def told(done: subprocess.CompletedProcess[str]) -> str:
    """All that a process said, for an assertion's message."""
    return f"exit status {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
