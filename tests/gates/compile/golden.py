"""Recorded resources and instructions of every kernel, by Triton's version and target, and how a run is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
GOLDEN = HERE / "golden"
NEWEST = installed("triton")
OLDER = {p.name.removeprefix("triton-"): p for p in sorted(Path(sys.prefix).glob("triton-*"))}
"""Further versions, in folders of this environment."""

TARGETS = ("sm_90", "sm_80", "sm_100", "gfx90a", "gfx942", "gfx950")
RUNS = [*((NEWEST, target) for target in TARGETS), *((version, "sm_90") for version in OLDER)]
"""The newest Triton for every target; older ones, which GPU machines have, for the target of those machines."""

LIMIT_S = 900
GROWTH = 0.05
"""Registers, shared memory and instructions may grow by this share before a run fails."""


def run(version: str, target: str) -> dict[str, Any]:
    """What each kernel compiles to, in a process that has that Triton."""
    older = [str(OLDER[version])] if version != NEWEST else []
    paths = [*older, str(REPOSITORY), str(REPOSITORY / "core"), str(REPOSITORY / "backends/cuda")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "tests.gates.compile.compiler", target, str(out)]
        done = subprocess.run(
            command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(out.read_text())
    assert found["triton"] == version, f"Triton {found['triton']} ran instead of {version}"
    return found["kernels"]


def path(version: str, target: str) -> Path:
    return GOLDEN / f"{target}-triton-{version}.json"


def read(version: str, target: str) -> dict[str, Any]:
    return json.loads(path(version, target).read_text())


def write(where: Path, found: dict[str, Any]) -> None:
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    where.write_text("{\n" + lines + "\n}\n")


def faults(found: dict[str, Any], golden: dict[str, Any], shared_bytes: int, registers: int) -> list[str]:
    """What is wrong with a run, a line each: failures, spills, limits, and drift from what was recorded. No recorded
    kernel may spill: what does not fit is loaded or computed again where it is used.
    """
    wrong = [f"{name}: recorded, but not compiled" for name in sorted(golden.keys() - found.keys())]
    for name, now in found.items():
        if "error" in now:
            wrong.append(f"{name}: {now['error']}")
            continue
        wrong += [f"{name}: {what} {now[what]}, must be 0" for what in ("spills", "stack") if now[what]]
        wrong += [f"{name}: {what}" for what in now.get("order", ())]
        for what, most in (("shared", shared_bytes), ("registers", registers)):
            if now[what] > most:
                wrong.append(f"{name}: {what} {now[what]}, at most {most}")
        was = golden.get(name)
        if was is None:
            wrong.append(f"{name}: not recorded; make gates-record")
            continue
        if now["mix"] != was["mix"]:
            wrong.append(f"{name}: instructions {now['mix']}, recorded {was['mix']}")
        if now.get("arrivals") != was.get("arrivals"):
            wrong.append(f"{name}: arrivals {now.get('arrivals')}, recorded {was.get('arrivals')}")
        for what in ("registers", "shared", "instructions"):
            if now[what] > was[what] * (1 + GROWTH):
                wrong.append(f"{name}: {what} {now[what]}, recorded {was[what]}")
    return wrong
