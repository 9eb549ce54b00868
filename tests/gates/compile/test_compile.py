"""Every kernel compiles for every target without spilling, within the hardware's limits, and to what was recorded."""

from __future__ import annotations

import copy

import pytest

from tests.gates.compile.compiler import GRID_CONTROL
from tests.gates.compile.golden import RUNS, faults, read, run
from tests.gates.compile.targets import TARGETS


@pytest.mark.parametrize(("version", "target"), RUNS)
def test_compiles_to_what_was_recorded(version, target, record_property):
    record_property("feature", "offline compile")
    found = run(version, target)
    limits = TARGETS[target]
    assert found
    wrong = faults(found, read(version, target), limits.shared_bytes, limits.registers)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("version", "target"), RUNS)
def test_only_launches_ahead_wait_for_the_one_before(version, target):
    """By what was recorded, with which the compilers' output is held to agree above."""
    kernels = read(version, target)
    ahead = {name for name in kernels if name.partition("/")[0].endswith("_ahead")}
    assert bool(ahead) == (target in ("sm_90", "sm_100"))
    for name, found in kernels.items():
        assert [word in found["mix"] for word in GRID_CONTROL] == [name in ahead] * 2, name


def test_faults_are_found():
    good = {"k/f": {"registers": 100, "stack": 0, "spills": 0, "instructions": 1000, "mix": {"HMMA": 8}, "shared": 64}}
    assert faults(good, good, 64, 255) == []
    for change, words in (
        ({"spills": 2}, "spills 2, must be 0"),
        ({"stack": 8}, "stack 8, must be 0"),
        ({"shared": 65}, "shared 65, at most 64"),
        ({"registers": 106}, "registers 106, recorded 100"),
        ({"instructions": 1051}, "instructions 1051, recorded 1000"),
        ({"mix": {"HMMA": 16}}, "instructions {'HMMA': 16}, recorded {'HMMA': 8}"),
        ({"error": "no end within 60 s"}, "no end within 60 s"),
    ):
        bad = copy.deepcopy(good)
        bad["k/f"].update(change)
        assert [w for w in faults(bad, good, 64, 255) if words in w], words
    assert faults({}, good, 64, 255) == ["k/f: recorded, but not compiled"]
    assert faults(good, {}, 64, 255) == ["k/f: not recorded; make gates-record"]
