"""pyproject.toml and constraints.txt say what is so."""

from __future__ import annotations

import sys

import pytest

from tests.house import rules
from tests.house.rules import none

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((rules.REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def test_a_plugin_for_each_backend_folder():
    plugins = PROJECT["entry-points"]["inferplane.plugins"]
    folders = {path.name for path in (rules.REPOSITORY / "backends").iterdir() if path.is_dir()}
    assert plugins == {device: f"inferplane_{device}.plugin" for device in folders}, "the one list of backends"
    assert folders == set(rules.DEVICES)


def test_entry_points_can_be_imported():
    points = [*PROJECT["scripts"].values()]
    points += [value for group in PROJECT["entry-points"].values() for value in group.values()]
    names = [point.partition(":")[0] for point in points]
    none([f"{name}: {brought['error']}" for name, brought in rules.imported_by(names).items() if brought["error"]])


def test_building_needs_no_torch():
    assert "torch" not in rules.requirement_names(PYPROJECT["build-system"]["requires"])


def test_constraints_cover_what_is_required():
    pinned, found = rules.constrained_names(rules.REPOSITORY / "constraints.txt")
    none(found)
    extras = PROJECT["optional-dependencies"]
    tested = [line for extra in ("test", "lint", "serving", "test-serving") for line in extras[extra]]
    required = rules.requirement_names(PROJECT["dependencies"] + tested) - {PROJECT["name"]}
    none([f"{name}: required, and not in constraints.txt" for name in sorted(required - pinned)])


@pytest.mark.parametrize(
    "line",
    [
        "torch>=2.5",
        "torch",
        "torch==2.13.0+cpu",
        "torch @ file:///tmp/torch.whl",
        "--find-links wheels",
        "torch==2.13.0,<3",
    ],
)
def test_constraints_that_pin_nothing(tmp_path, line):
    (tmp_path / "constraints.txt").write_text(f"numpy==2.4.6\n{line}\n")
    pinned, found = rules.constrained_names(tmp_path / "constraints.txt")
    assert len(found) == 1
    assert "numpy" in pinned


def test_constraints_mind_their_markers(tmp_path):
    (tmp_path / "constraints.txt").write_text('numpy==1.0; python_version < "3.0"\nPlu_ggy==1.7.0\n')
    assert rules.constrained_names(tmp_path / "constraints.txt") == ({"plu-ggy"}, [])


def test_demo_needs_no_extra():
    """`make demo` installs without extras, so no vendor's package may be a plain requirement."""
    required = rules.requirement_names(PROJECT["dependencies"])
    vendors = {name.replace("_", "-") for name in rules.VENDOR_PACKAGES}
    assert not required & vendors
