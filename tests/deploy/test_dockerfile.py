"""The Dockerfile names files and devices that exist, takes no secret and drops rights; hadolint finds nothing."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess

import pytest

from inferplane.plugins import host
from tests.deploy.tools import DEPLOY, find_program
from tests.house.rules import DEVICES, REPOSITORY

TEXT = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
LINES = [line for line in TEXT.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
BASES = {name.removeprefix("base-") for name in re.findall(r"^FROM \S+ AS (base-\S+)$", TEXT, re.MULTILINE)}


def ignored(path: str) -> bool:
    """Whether .dockerignore leaves a path of the repository out: the last pattern that matches it decides."""
    left_out = False
    for line in (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        parts = ["/".join(path.split("/")[: n + 1]) for n in range(path.count("/") + 1)]
        names = [pattern, pattern.removeprefix("**/")] if pattern.startswith("**/") else [pattern]
        deep = pattern.startswith("**/") and any(fnmatch.fnmatchcase(p.rpartition("/")[2], names[1]) for p in parts)
        if deep or any(fnmatch.fnmatchcase(p, pattern) and p.count("/") == pattern.count("/") for p in parts):
            left_out = not line.startswith("!")
    return left_out


def test_hadolint_finds_nothing():
    found = subprocess.run([find_program("hadolint"), str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, ""), found.stdout + found.stderr


def test_hadolint_finds_a_planted_fault(tmp_path):
    path = tmp_path / "Dockerfile"
    path.write_text(TEXT.replace("USER 10001:10001", "USER root"))
    found = subprocess.run([find_program("hadolint"), str(path)], capture_output=True, text=True)
    assert found.returncode == 1 and "DL3002" in found.stdout


def test_each_device_has_a_base():
    stages = re.split(r"^FROM ", TEXT, flags=re.MULTILINE)
    named = {}
    for base in BASES:
        stage = next(text for text in stages if f" AS base-{base}\n" in text)
        named[base] = re.search(r"^ENV INFERPLANE_DEVICE=(\S+)", stage, re.MULTILINE)[1]
    assert {name.partition(":")[0] for name in named.values()} == set(DEVICES)
    assert set(named.values()) <= {entry.name for entry in host().devices()}
    described = re.search(r"^# DEVICE +(.*)$", TEXT, re.MULTILINE)[1]
    assert set(re.findall(r"[a-z]+", re.sub(r"\(.*?\)", "", described))) == BASES


def test_images_are_pinned_and_made_in_stages():
    images = [image for image in re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE) if not image.startswith("base-")]
    defaults = dict(line[4:].split("=", 1) for line in LINES if line.startswith("ARG ") and "=" in line)
    for image in images:
        full = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], image)
        assert re.fullmatch(r"[\w./-]+:[\w.-]+", full) and not full.endswith(":latest"), full
    assert TEXT.index("AS build\n") < TEXT.index("AS inferplane\n")
    last = TEXT[TEXT.index("AS inferplane\n") :]
    assert "apt-get" not in last and "pip " not in last
    assert last.index("USER 10001:10001") < last.index("ENTRYPOINT")
    assert json.loads(re.search(r"^ENTRYPOINT (.*)$", last, re.MULTILINE)[1]) == ["inferplane-entrypoint"]
    assert "inferplane-entrypoint" in re.search(r"^HEALTHCHECK .* CMD (.*)$", last, re.MULTILINE)[1]


def test_no_secret_enters_an_image():
    arguments = [line.split()[1] for line in LINES if line.startswith(("ARG ", "ENV "))]
    assert arguments and not [name for name in arguments if re.search("TOKEN|KEY|SECRET|PASSWORD", name)]


def test_the_context_has_what_is_copied_and_no_more():
    copies = [line.split()[1:-1] for line in LINES if line.startswith("COPY ") and "--from" not in line]
    sources = [name for names in copies for name in names if not name.startswith("--")]
    assert sources and all((REPOSITORY / name).exists() for name in sources)
    assert [name for name in sources if ignored(name)] == []
    kept_out = (".git/config", ".env", "docs/cli.md", ".venv/bin/python", "tests/README.md", "deploy/compose.yaml")
    inside = ("core/inferplane/__init__.py", "core/inferplane/models/demo", "backends/cpu/csrc/api.cpp")
    assert [name for name in kept_out if not ignored(name)] == [] and [name for name in inside if ignored(name)] == []
    built = ("core/inferplane/__pycache__/a.pyc", "backends/cpu/inferplane_cpu/_native.so", "backends/cpu/tests/a.py")
    assert all(ignored(name) for name in built)


@pytest.mark.parametrize(
    ("variables", "vendor", "pins", "index"),
    [
        ({}, "", "constraints.txt", "--extra-index-url https://download.pytorch.org/whl/cpu "),
        ({"DEVICE": "cuda", "CUDA": "12.8.1"}, "", "constraints.txt", "/whl/cu128 "),
        ({"DEVICE": "cuda", "CUDA": "13.0.2"}, "numpy==2.0.0", "constraints.txt", "/whl/cu130 "),
        ({"DEVICE": "xpu", "TORCH_INDEX": "https://mirror/xpu"}, "", "constraints.txt", "https://mirror/xpu "),
        ({"DEVICE": "npu"}, "torch==2.7.1+cpu\ntorch-npu==2.7.1", "vendor.txt", ""),
    ],
)
def test_what_is_installed(tmp_path, variables, vendor, pins, index):
    """The commands of install.sh, with programs that only write down how they are called."""
    programs, target = tmp_path / "bin", tmp_path / "target"
    (target / "bin").mkdir(parents=True)
    programs.mkdir()
    for path in (programs / "python3", target / "bin" / "python"):
        path.write_text(
            f'#!/bin/sh\necho "$0 $*" >> {tmp_path}/calls\n'
            f'case "$*" in *"pip list"*) printf "%s\\n" "pip==1" "{vendor}" ;; esac\n'
        )
        path.chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "EXTRAS": "serving,otel", **variables}
    done = subprocess.run(
        ["sh", str(DEPLOY / "install.sh"), str(target)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == f"{programs}/python3 -m venv --system-site-packages {target}"
    installed = next(call for call in calls if "pip install" in call)
    assert installed.startswith(f"{target}/bin/python -m pip install -c {pins} ") and installed.endswith(
        ".[serving,otel]"
    )
    assert (index in installed) if index else "index-url" not in installed
    assert (tmp_path / "vendor.txt").read_text().split() == vendor.split()
