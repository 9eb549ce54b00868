"""Fixtures of the unit tests."""

from __future__ import annotations

import io
import sys

import pytest

from tests.house.rules import REPOSITORY
from tests.unit.support.fake_wheels import Wheels


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """An empty folder first on sys.path, for fake distributions."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # a module may be replaced within a second
    monkeypatch.delenv("INFERPLANE_PLUGINS", raising=False)
    installed = Wheels(tmp_path)
    yield installed
    installed.forget()


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs the command in this process; returns exit code, standard output and standard error."""
    from inferplane.cli import main

    monkeypatch.setattr(main, "prepare", lambda environment: None)

    def run(*words: str, stdin: str | None = None) -> tuple[int, str, str]:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main.main(words)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def plain_devices(monkeypatch):
    """Names of the in-tree devices, served by a host of this test's own."""
    from inferplane.plugins import discover

    modules = [
        f"inferplane_{path.name}.plugin" for path in sorted((REPOSITORY / "backends").iterdir()) if path.is_dir()
    ]
    host = discover(",".join(("only", *modules)))
    monkeypatch.setattr("inferplane.plugins.host", lambda: host)
    return {entry.name for entry in host.devices()}
