"""A backend is one folder of the tree and one line of one list: tried on a copy of the tree with a backend more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.house.rules import REPOSITORY, plant

FILES = ("pyproject.toml", "setup.py", "constraints.txt", "Makefile", "README.md", "LICENSE")
FOLDERS = ("core", "backends", "tests/house", "tests/vendors", "tools")
BACKEND = '''
"""The new chip's backend."""
from inferplane.kernels.composed import composed_kernels
from inferplane.plugin import HOST, Backend, DeviceState, Features, Presence, Probe


class NewchipBackend(Backend):
    """A chip that computes on the host."""

    name, torch_device = "newchip", HOST

    @classmethod
    def probe(cls):
        return Probe(Presence.AVAILABLE, "added in this test", devices=1)

    def open(self):
        return DeviceState(HOST, "New chip", "new1", Features(["bf16"]), self.memory())

    def kernels(self):
        return composed_kernels()
'''
PLUGIN = """
'''Registers the new chip.'''
from inferplane.plugin import hookimpl

INFERPLANE_API = (1, 0)


@hookimpl
def inferplane_register_backends(register):
    register("newchip", "inferplane_newchip.backend:NewchipBackend")
"""
FOLDER = {
    "README.md": "# New chip",
    "backend.json": '{"devices": [{"device": "newchip", "runner": ["newchip"]}], "vendor_packages": ["nc"]}',
    "inferplane_newchip/__init__.py": '"""The backend of a new chip."""\n',
    "inferplane_newchip/plugin.py": PLUGIN,
    "inferplane_newchip/backend.py": BACKEND,
    "inferplane_newchip/driver.py": '"""The vendor\'s packages."""\nimport nc\nimport nc.streams\n',
}
LIST = '[project.entry-points."inferplane.plugins"]\n'
"""The one list that a backend has to be in. An extra (`[project.optional-dependencies]`) is for a vendor whose packages
an index serves: this backend has none."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with the folder `backends/newchip` and its line in the one list."""
    tree = tmp_path_factory.mktemp("tree")
    for name in FILES:
        shutil.copy(REPOSITORY / name, tree)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.egg-info")
        shutil.copytree(REPOSITORY / name, tree / name, ignore=ignored)
    for name, text in FOLDER.items():
        plant(tree / "backends" / "newchip", text, name)
    plant(tree / "tests" / "vendors" / "newchip", "{}", "suite.json")
    plant(tree / "tests" / "vendors" / "newchip", "torch", "requirements.txt")
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert project.count(LIST) == 1
    plant(tree, project.replace(LIST, f'{LIST}newchip = "inferplane_newchip.plugin"\n'), "pyproject.toml")
    (tree / "docs").mkdir()
    return tree


@pytest.fixture
def run(tree):
    """Runs a command in the copy, whose packages alone are found; returns its output."""

    def run(*command: str, code: int = 0, **variables: str) -> str:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("INFERPLANE_")}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (tree, tree / "core", *(tree / "backends").iterdir())))
        environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **variables}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return run


def test_it_is_packaged_and_found_when_installed(tree, run):
    run(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tree))
    found = json.loads(run(sys.executable, "-m", "inferplane", "devices", "--json"))
    assert {d["name"]: (d["reason"], d["in_tree"]) for d in found["devices"]}["newchip"] == ("added in this test", True)
    packages = "import setuptools.build_meta, distutils.core as d; print(d.run_setup('setup.py', stop_after='config')"
    shown = run(sys.executable, "-W", "ignore", "-c", f"{packages}.package_dir['inferplane_newchip'])")
    assert shown.strip() == "backends/newchip/inferplane_newchip"


def test_the_rules_of_the_house_and_the_pages_know_it(tree, run):
    shown = run(sys.executable, "-c", "from tests.house import rules as r; print(r.DEVICES, r.VENDOR_PACKAGES)")
    assert "'newchip'" in shown and "'nc'" in shown
    words = "from tests.house.rules import *; print(device_names(plant(Path('planted'), 'x = newchip')))"
    assert "core names a device" in run(sys.executable, "-c", words)
    run(sys.executable, "tools/generate_docs.py")
    assert all("| newchip |" in (tree / f"docs/{name}.md").read_text() for name in ("support-matrix", "family-matrix"))


def test_its_suites_and_its_hardware_are_run(run):
    shown = run("make", "--dry-run", "test-vendors")
    assert "run.py newchip" in shown and "-r tests/vendors/newchip/requirements.txt" in shown
    matrix = (sys.executable, "tools/conformance_matrix.py")
    assert "newchip" not in run(*matrix) and "newchip" in run(*matrix, "--skipped")
    attached = {"INFERPLANE_RUNNERS": '["newchip"]'}
    assert "newchip" in run(*matrix, **attached)
    assert "newchip" not in run(*matrix, **attached, GITHUB_EVENT_NAME="pull_request"), "strangers use no own runner"


@pytest.mark.parametrize(
    ("package", "line", "contract"),
    [
        ("core/inferplane/ops", "import inferplane_newchip", "core knows no backend"),
        ("backends/cpu/inferplane_cpu", "import inferplane_newchip", "backends do not know each other"),
        ("backends/newchip/inferplane_newchip", "import inferplane.ops", "backends import only inferplane.plugin"),
        (None, "", ""),
    ],
)
def test_the_contracts_of_imports_hold_for_it(tree, run, package, line, contract):
    pytest.importorskip("importlinter")
    planted = tree / (package or "build") / "planted.py"
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(line)
    shown = run(sys.executable, "tools/lint_imports.py", code=1 if package else 0)
    planted.unlink()
    assert not package or contract in shown.partition("Broken contracts")[2]


def test_types_are_checked_without_its_vendors_packages(tree, run):
    """A backend may import what only its vendor has; what core imports has to be there or be listed."""
    pytest.importorskip("mypy")
    command = (sys.executable, "-m", "mypy", "--follow-imports=skip")
    run(*command, str(tree / "backends/newchip/inferplane_newchip/driver.py"))
    planted = tree / "core" / "inferplane" / "plugins" / "planted.py"
    planted.write_text("import nc\n")
    assert "[import-not-found]" in run(*command, str(planted), code=1)
    planted.unlink()
