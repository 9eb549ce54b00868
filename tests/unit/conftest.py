"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from tests.unit.fake_wheels import Wheels


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """An empty folder first on sys.path, for fake distributions."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # a module may be replaced within a second
    monkeypatch.delenv("INFERPLANE_PLUGINS", raising=False)
    installed = Wheels(tmp_path)
    yield installed
    installed.forget()
