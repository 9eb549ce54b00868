"""Tests of units lie where their subject lies: the folders of tests/unit are packages of core."""

from __future__ import annotations

from pathlib import Path

from tests.house.rules import REPOSITORY, none, plant

CORE = REPOSITORY / "core" / "inferplane"
UNIT = REPOSITORY / "tests" / "unit"
NOT_PACKAGES = ("support",)


def folders_of_no_package(tests: Path, core: Path, others: tuple[str, ...] = NOT_PACKAGES) -> list[str]:
    """Folders with tests that are no package of `core`, and tests of a package that lie above it."""
    found = []
    for path in sorted(tests.rglob("*.py")):
        folder = path.parent.relative_to(tests)
        if folder.parts[:1] not in [(name,) for name in others] and not (core / folder / "__init__.py").is_file():
            found.append(f"{path}: core has no package {'.'.join(folder.parts)}")
        elif path.name.startswith("test_") and (core / folder / path.stem[5:] / "__init__.py").is_file():
            found.append(f"{path}: tests of a package lie in a folder of its name")
    return found


def test_unit_tests_lie_in_folders_of_core(tmp_path):
    none(folders_of_no_package(UNIT, CORE))
    core, tests = tmp_path / "core", tmp_path / "tests"
    for package in ("", "engine/", "engine/runner/"):
        plant(core, "", f"{package}__init__.py")
    for right in ("conftest.py", "support/small.py", "engine/test_x.py", "engine/runner/test_y.py"):
        plant(tests, "", right)
    none(folders_of_no_package(tests, core))
    for wrong in ("engines/test_x.py", "engine/run/test_y.py", "runner/test_z.py", "engine/test_runner.py"):
        plant(tests, "", wrong)
    assert len(folders_of_no_package(tests, core)) == 4
