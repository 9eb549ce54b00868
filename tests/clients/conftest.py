"""The server that a client's tests ask, which run.py has started. Nothing here imports Inferplane: its packages may
disagree with the client's.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest

MODEL = "scripted"
THOUGHT = "The last message decides what is to do."


class Server(NamedTuple):
    """Where the server is: the address of HTTP ("http://127.0.0.1:8000"), and of gRPC without a scheme."""

    url: str
    grpc: str


@pytest.fixture(scope="session")
def client_name() -> str:
    """The client whose environment this is; skipped for those that the page has no block for."""
    name = os.environ.get("CLIENTS_NAME", "")
    return pytest.skip("docs/clients.md has no block for it") if name == "agents" else name


@pytest.fixture(scope="session")
def server() -> Server:
    """The running server."""
    if "CLIENTS_SERVER" not in os.environ:
        pytest.fail("these tests need the server of tests/clients/run.py; call `make test-clients`")
    return Server(os.environ["CLIENTS_SERVER"], os.environ["CLIENTS_GRPC"])
