"""Connections of one address have a limit, so that one client cannot take all of them from the others.

The class of advisories: one client exhausts the connections of a server, without a key and without a request.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from inferplane.serving.http.protocol import AddressLimit
from tests.serving.live import Live
from tests.serving.test_raw_socket import read_answer, status, talk

ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMIT, FLOOD = 4, 100
REFUSED = 'inferplane:requests_rejected_total{reason="too_many_connections"}'


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with Live("--max-connections-per-address", str(LIMIT), "--max-connections", "96") as live:
        yield live
        assert live.stop() == 0


def connect(server: Live, source: str) -> socket.socket:
    sock = socket.create_connection((server.host, server.port), timeout=30, source_address=(source, 0))
    sock.settimeout(30)
    return sock


def is_served(server: Live, source: str) -> bool:
    with connect(server, source) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(ASK)
        return status(read_answer(sock)) == 200
    return False


def wait_served(server: Live, source: str) -> None:
    limit = time.monotonic() + 30
    while not is_served(server, source):
        assert time.monotonic() < limit, f"connections of {source} that were closed still count"
        time.sleep(0.05)


@pytest.mark.parametrize("sends", [b"", ASK, b"POST /v1/completions HTTP/1.1\r\n" + b"x" * 200_000])
def test_one_connection_too_many_is_answered_and_closed(server: Live, sends: bytes) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(server, "127.0.0.2")) for _ in range(LIMIT)]
        with connect(server, "127.0.0.2") as more:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                more.sendall(sends)
            head, _, body = read_answer(more).partition(b"\r\n\r\n")
            assert status(head) == 503 and b"retry-after: 1" in head and b"connection: close" in head
            error = json.loads(body)["error"]
            assert (error["code"], error["type"]) == ("too_many_connections", "unavailable_error")
            assert "4 connections of 127.0.0.2 are open" in error["message"]
            with contextlib.suppress(ConnectionResetError):
                assert more.recv(1) == b""
        assert is_served(server, "127.0.0.3"), "another address is not concerned"
        held[0].sendall(ASK)
        assert status(read_answer(held[0])) == 200, "nor is a connection that was there"
        held[0].close()
        wait_served(server, "127.0.0.2")
    wait_served(server, "127.0.0.2")


def test_a_flood_from_one_address_leaves_connections_for_others(server: Live) -> None:
    """More than all connections of the server; no client reads its refusal, or closes."""
    with httpx.Client(base_url=server.url, timeout=60) as client, contextlib.ExitStack() as stack:

        def refused() -> float:
            lines = client.get("/metrics").text.splitlines()
            return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(REFUSED))

        before = refused()
        for _ in range(FLOOD):
            stack.enter_context(connect(server, "127.0.0.4"))
        limit = time.monotonic() + 30
        while refused() - before < FLOOD - LIMIT:
            assert time.monotonic() < limit
            assert is_served(server, "127.0.0.5")
    wait_served(server, "127.0.0.4")


def test_without_the_setting_an_address_has_no_limit() -> None:
    """As behind a proxy, where all connections come from one address."""
    with Live() as live, contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(live.connect())
        assert status(talk(live, ASK)) == 200
        assert live.stop() == 0


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("not an address", "not an address", True),
    ],
)
def test_which_addresses_count_as_one(one: str, other: str, alike: bool) -> None:
    limit = AddressLimit(1)
    release = limit.acquire(one)
    assert release is not None
    assert (limit.acquire(other) is None) == alike
    release()
    assert limit.acquire(one) is not None


def test_only_some_refused_connections_wait_for_their_clients() -> None:
    limit = AddressLimit(1, max_refused=2)
    first, second = limit.acquire_refused(), limit.acquire_refused()
    assert first is not None and second is not None and limit.acquire_refused() is None
    first()
    assert limit.acquire_refused() is not None and limit.acquire_refused() is None
