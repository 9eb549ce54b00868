"""Fixtures of the suite. A test that takes `device` runs only once the device could be opened."""

from __future__ import annotations

import pytest

from inferplane.conformance.plugin import MEASURED, SUBJECT


@pytest.fixture(scope="session")
def subject(request):
    """What is under test; not opened."""
    return request.config.stash[SUBJECT]


@pytest.fixture(scope="session")
def device(request, subject):
    """What is under test, opened. When that fails nothing else can be said of it, and the run ends."""
    try:
        subject.open()
    except Exception as error:
        words = f"{subject.name} says that it is available ({subject.entry.probe.reason}), but open() raised:\n{error}"
        request.session.shouldfail = words
        pytest.fail(words, pytrace=False)
    return subject


@pytest.fixture
def measured(record_property):
    """Notes what a case found, for the evidence: `measured(op=..., error=..., tolerance=...)`."""
    return lambda **facts: record_property(MEASURED, facts)
