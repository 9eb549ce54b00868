"""Fixtures of the suite. A test that takes `device` runs only if the device can be opened."""

from __future__ import annotations

import pytest

from inferplane.conformance.plugin import MEASURED, SUBJECT


@pytest.fixture(scope="session")
def subject(request):
    """The device under test, not opened."""
    return request.config.stash[SUBJECT]


@pytest.fixture(scope="session")
def device(request, subject):
    """The device under test, opened. If it cannot be opened, the run ends."""
    try:
        subject.open()
    except Exception as error:
        message = f"{subject.name} claims to be available ({subject.entry.probe.reason}), but open() raised:\n{error}"
        request.session.shouldfail = message
        pytest.fail(message, pytrace=False)
    return subject


@pytest.fixture
def measured(record_property):
    """Records facts about a case for the evidence: `measured(op=..., error=..., tolerance=...)`, and `refused=True`
    before a case is skipped because the kernel does not accept it."""
    return lambda **facts: record_property(MEASURED, facts)
