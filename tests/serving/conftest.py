"""One live server with the demo model per test worker, shared by the tests that do not change it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.live import Live


@pytest.fixture(scope="session")
def server() -> Iterator[Live]:
    with Live("--max-num-seqs", "16", "--allowed-hosts", "*") as live:
        yield live
        assert live.process.poll() is None, live.text[-3000:]
        live.at_rest()
        assert live.stop() == 0


@pytest.fixture
def client(server: Live):
    with server.client() as client:
        yield client


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for TMPDIR: `tmp_path` may be too long for the path of the engine's socket in it."""
    with tempfile.TemporaryDirectory(prefix="ip-") as folder:
        yield Path(folder)
