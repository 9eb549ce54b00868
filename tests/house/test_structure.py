"""The structure of core and backends, held by rules; each rule is proved on planted faults."""

from __future__ import annotations

import pytest

from tests.house import structure
from tests.house.rules import BACKEND_PACKAGES, CORE_PACKAGE, REPOSITORY, SHIPPED, none, plant

ALIKE = {
    "models/families": "one file per family of models",
    "tests/e2e": "a list of cases: one file per promise to users, run on whole engines",
    "tests/serving": "a list of cases: one file per promise to clients, run on a whole server",
}
"""End of a folder's path -> what its files have in common."""
SHARED_CLASS_NAMES: dict[str, str] = {}
"""Class name -> why several modules define it."""


@pytest.mark.parametrize(
    "back",
    [
        "def later():\n    from fault.a import y\n    return y\n",
        "from . import a\n",
        "def later():\n    from .a import y\n    return y\n",
        "import importlib\n\na = importlib.import_module('fault.a')\n",
        "from importlib import import_module\n\na = import_module('.a', 'fault')\n",
        "a = __import__('fault.a')\n",
    ],
)
def test_circles_of_imports_are_found(back, tmp_path):
    folder = plant(tmp_path / "fault", "from fault.b import x\n", "a.py")
    plant(folder, back, "b.py")
    plant(folder, "", "__init__.py")
    assert structure.import_circles(folder) == ["imports run in a circle: fault.a, fault.b"]


def test_circles_over_a_folder_are_found(tmp_path):
    folder = plant(tmp_path / "fault", "from .inner import b\n", "a.py")
    plant(folder, "from ..a import x\n", "inner/b.py")
    plant(folder, "from . import b\n", "inner/__init__.py")
    plant(folder, "", "__init__.py")
    assert structure.import_circles(folder) == ["imports run in a circle: fault.a, fault.inner.b"]


def test_imports_run_in_no_circle():
    none(structure.import_circles(*SHIPPED))


def test_no_folder_is_crowded(tmp_path):
    beside = (REPOSITORY / name for name in ("tests", "tools", "benchmarks"))
    folders = (CORE_PACKAGE, *(path.parent for path in BACKEND_PACKAGES), *beside)
    none(structure.crowded_folders(*folders, alike=tuple(ALIKE)))
    most = structure.MAX_FILES_IN_AN_ENGINE_PACKAGE
    none(structure.crowded_folders(CORE_PACKAGE / "engine", most=most))
    for number in range(21):
        plant(tmp_path, "", f"file{number}.py")
    assert len(structure.crowded_folders(tmp_path)) == 1
    assert structure.crowded_folders(tmp_path, alike=(tmp_path.name,)) == []
    for number in range(13, 21):
        (tmp_path / f"file{number}.py").unlink()
    assert structure.crowded_folders(tmp_path) == []
    assert len(structure.crowded_folders(tmp_path, most=most)) == 1


def test_no_class_is_long(tmp_path):
    none(structure.long_classes(*SHIPPED))
    plant(tmp_path, "class Long:\n" + "    x = 1\n" * 300)
    assert len(structure.long_classes(tmp_path)) == 1


ELEVEN = ", ".join(f"a{i}" for i in range(11))


@pytest.mark.parametrize(
    "fault",
    [
        f"def f({ELEVEN}): ...\n",
        f"async def f({ELEVEN}): ...\n",
        f"def f({ELEVEN[:-5]}, *more): ...\n",
        f"def f(*, {ELEVEN[:-5]}, **more): ...\n",
        f"f = lambda {ELEVEN}: 0\n",
        f"class A:\n    def __init__(self, {ELEVEN}): ...\n",
        f"@functools.cache\ndef f({ELEVEN}): ...\n",
    ],
)
def test_long_signatures_are_found(fault, tmp_path):
    assert len(structure.long_signatures(plant(tmp_path, fault))) == 1
    assert len(structure.long_signatures(plant(tmp_path / "kernels" / "triton", fault))) == 1


@pytest.mark.parametrize(
    "fine",
    [
        f"def _f({ELEVEN}): ...\n",
        f"@triton.jit\ndef f({ELEVEN}): ...\n",
        f"@triton.autotune([])\n@jit\ndef f({ELEVEN}): ...\n",
        f"@gluon.jit(noinline=True)\ndef f({ELEVEN}): ...\n",
        f"class A:\n    def f(self, {ELEVEN[:-5]}): ...\n",
    ],
)
def test_signatures_are_short_enough(fine, tmp_path):
    none(structure.long_signatures(plant(tmp_path, fine)))


def test_no_signature_is_long():
    none(structure.long_signatures(*SHIPPED))


def test_class_names_have_one_home(tmp_path):
    none(structure.shared_class_names(*SHIPPED, allowed=SHARED_CLASS_NAMES))
    plant(tmp_path, "class Same: ...\nclass Other: ...\nclass Twice: ...\n", "a.py")
    plant(tmp_path, "class A:\n    class Same: ...\n", "b.py")
    plant(tmp_path, "def f():\n    class _Other: ...\n", "inner/c.py")
    found = structure.shared_class_names(tmp_path)
    assert [line.partition(": ")[2].split()[1] for line in found] == ["Other", "Same"]
    assert structure.shared_class_names(tmp_path, allowed={"Other": "why", "Same": "why", "Twice": "why"}) == [
        "Twice: allowed, and has one home"
    ]
