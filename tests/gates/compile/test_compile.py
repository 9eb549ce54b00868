"""Every kernel compiles for every target without spilling, within the hardware's limits, and to what was recorded."""

from __future__ import annotations

import copy

import pytest

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
