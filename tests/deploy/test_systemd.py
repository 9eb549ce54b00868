"""The unit of systemd: read by systemd's own tools where they are, its settings by Inferplane."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inferplane.serving.configure import resolve
from tests.deploy.tools import DEPLOY, find_program

FOLDER = DEPLOY / "systemd"
PROGRAM = "/opt/inferplane/bin/inferplane"
MAX_EXPOSURE = 20
"""Tenths of systemd's scale from 0 (nothing is exposed) to 10; the unit has 1.5."""


def copy_unit(folder: Path, extra: str = "") -> Path:
    """The unit with a program that is here, and its drop-in beside it."""
    path = folder / "inferplane.service"
    text = (FOLDER / "inferplane.service").read_text().replace(PROGRAM, sys.executable)
    path.write_text(text.replace("[Install]", f"{extra}\n[Install]"))
    (folder / "inferplane.service.d").mkdir()
    shutil.copy(FOLDER / "accelerator.conf", folder / "inferplane.service.d")
    return path


def verify(path: Path) -> str:
    """What `systemd-analyze verify` says about a unit."""
    program = find_program("systemd-analyze", in_lint=False)
    environment = {**os.environ, "SYSTEMD_COLORS": "0"}
    done = subprocess.run([program, "verify", str(path)], capture_output=True, text=True, env=environment)
    lines = [line for line in done.stderr.splitlines() if line.startswith((path.name, str(path.parent)))]
    return "\n".join(lines)


def test_systemd_reads_the_unit(tmp_path):
    assert verify(copy_unit(tmp_path)) == ""


@pytest.mark.parametrize("fault", ["RestartSecs=5", "ProtectSystem=sometimes", "SystemCallFilter=@no-such-group"])
def test_systemd_finds_a_planted_fault(tmp_path, fault):
    assert verify(copy_unit(tmp_path, fault)) != ""


def test_little_is_exposed():
    program = find_program("systemd-analyze", in_lint=False)
    help_text = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    if "--offline" not in help_text:
        pytest.skip("not checked: this systemd-analyze reads no units offline (before version 250)")
    command = [program, "security", "--offline=true", f"--threshold={MAX_EXPOSURE}", str(FOLDER / "inferplane.service")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_the_unit_starts_what_there_is():
    unit = (FOLDER / "inferplane.service").read_text()
    variables = dict(
        line.split("=", 1) for line in (FOLDER / "inferplane.env").read_text().splitlines() if line and line[0] != "#"
    )
    resolved = resolve({}, variables)
    assert resolved.notes == () and resolved.settings.health_port == 8001
    assert re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1] == f"{PROGRAM} serve"
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1]) > resolved.settings.drain_s + 5
    assert "KillMode=mixed" in unit and "MemoryDenyWriteExecute=yes" not in unit
