"""Mistakes that are easily made with the vendor's operators, made on purpose: each is caught by the emulator, because
the call breaks a limit, or by the op's oracle, because the numbers are wrong. The vendor's mistakes.py lists them.
"""

from __future__ import annotations

import pytest

from tests.vendors import profile
from tests.vendors.mistakes import find_fault

VENDOR = profile.current()
EMULATOR = VENDOR.module("emulated").EMULATOR
MISTAKES = VENDOR.module("mistakes").MISTAKES
pytestmark = VENDOR.mistakes_run


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.words.replace(" ", "_"))
def test_is_caught(mistake, monkeypatch):
    def said() -> str:
        return find_fault(VENDOR.device, mistake.dtype or VENDOR.dtype, mistake.kernel, mistake.sample)

    assert not said(), "the kernel itself is right"
    monkeypatch.setattr(EMULATOR, "listeners", [])  # a mistake is no call of the backend's
    mistake.make(monkeypatch)
    found = said()
    assert found, "nothing was said"
    assert mistake.caught in found, found
