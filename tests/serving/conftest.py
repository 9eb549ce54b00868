"""One live server with the demo model per test worker, shared by the tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator

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
