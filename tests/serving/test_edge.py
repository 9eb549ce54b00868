"""What a connection may cost before it is a request with a key: bodies nobody reads, tiny chunks, foreign names."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from inferplane.serving.keys import host_check
from inferplane.serving.lifecycle import descriptors
from inferplane.serving.settings import ServerSettings
from tests.serving.live import Live
from tests.serving.test_raw_socket import BODY, HOST, JSON, chunked, post, status, talk

KEY = "a-key-for-tests"
CHUNKED = JSON + b"Transfer-Encoding: chunked\r\n"
TINY = b"1\r\n \r\n"
HEALTH_S = 2.0
"""A bound that a loaded machine keeps, and that a body of millions of chunks breaks by far if it is read."""


@pytest.fixture(scope="module")
def keyed():
    with Live("--api-key", KEY) as live:
        yield live
        assert live.process.poll() is None
        assert live.stop() == 0


def read_all(sock: socket.socket) -> bytes:
    """Read until the server closes."""
    got = b""
    try:
        while piece := sock.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    return got


def healthy_s(server: Live) -> float:
    """Seconds that a health check takes on a new connection."""
    began = time.monotonic()
    assert status(talk(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")) == 200
    return time.monotonic() - began


NO_BODY = {
    "POST /health": 405,
    "GET /health": 200,
    "PUT /v2/health/live": 405,
    "DELETE /v2/health/ready": 405,
    "POST /nowhere": 401,
    "POST /v1/completions": 401,
    "GET /v1/models": 401,
}


@pytest.mark.parametrize("kind", ["chunked", "sized", "expect"])
@pytest.mark.parametrize("asked", NO_BODY)
def test_a_body_that_no_route_takes_is_not_waited_for(keyed, asked, kind):
    """Bodies read before the key is checked: resource exhaustion without authentication."""
    length = {
        "chunked": b"Transfer-Encoding: chunked\r\n",
        "sized": b"Content-Length: 4000000\r\n",
        "expect": b"Content-Length: 4000000\r\nExpect: 100-continue\r\n",
    }[kind]
    with keyed.connect() as sock:
        sock.settimeout(20)  # less than the 30 s allowed for a body: none of it is sent
        sock.sendall(asked.encode() + b" HTTP/1.1\r\nHost: localhost\r\n" + JSON + length + b"\r\n")
        got = read_all(sock)
    assert status(got) == NO_BODY[asked] and got.lower().count(b"connection: close") == 1, got[:300]
    assert got.count(b"HTTP/1.1 ") == 1  # no 100 Continue either


@pytest.mark.parametrize("head", ["POST /health", "POST /nowhere", "POST /v1/completions", "PATCH /version"])
def test_a_flood_of_one_byte_chunks_without_a_key_delays_nobody(keyed, head):
    """Chunked-body CPU exhaustion before authentication; it used to take the loop for seconds."""
    data = head.encode() + b" HTTP/1.1\r\nHost: localhost\r\n" + CHUNKED + b"\r\n" + TINY * 500_000
    with keyed.connect() as sock:
        sock.settimeout(30)
        sock.sendall(data)
        took = healthy_s(keyed)
        assert status(read_all(sock)) in (401, 405)
    assert took < HEALTH_S


@pytest.mark.parametrize("size", [1, 2, 16, 63])
def test_a_body_of_tiny_chunks_is_refused(server, size):
    """Chunked-body CPU exhaustion by a client that may send a body."""
    got = talk(server, chunked(*[b" " * size] * 1100))
    assert status(got) == 400 and b"connection: close" in got.lower()
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "tiny_chunks"
    assert healthy_s(server) < HEALTH_S


@pytest.mark.parametrize(
    "chunks",
    [
        [bytes([c]) for c in BODY],
        [b" "] * 900 + [BODY],
        [b" " * 66] * 1500 + [BODY],
        [b" " * 200_000] + [b" "] * 2000 + [BODY],
    ],
    ids=["a short body byte by byte", "below the count", "66 bytes each", "few bytes each, but not on average"],
)
def test_chunks_of_a_patient_client_are_accepted(server, chunks):
    assert status(talk(server, chunked(*chunks))) == 200


@pytest.mark.parametrize("pieces", [1, 7, 1000, 16 * 1024, 10**7])
def test_a_body_arrives_whole_however_it_is_cut(server, pieces):
    """Reading a few KiB a turn neither loses nor reorders bytes."""
    text = "".join(f"{i} " for i in range(3000 if pieces < 100 else 60_000))
    body = json.dumps({"prompt": text}).encode()
    cut = [body[i : i + 5000] for i in range(0, len(body), 5000)]
    for data in (chunked(*cut), post(JSON + b"Content-Length: %d\r\n" % len(body), body)):
        data = data.replace(b"/v1/completions", b"/tokenize", 1) + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
        with server.connect() as sock:
            sock.settimeout(30)
            for i in range(0, len(data), pieces):
                sock.sendall(data[i : i + pieces])
            got = b""
            while b'"version"' not in got:
                piece = sock.recv(65536)
                assert piece, got[:300]
                got += piece
        assert got.count(b"HTTP/1.1 ") == 2 and status(got) in (200, 400), got[:300]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\r\nGET /version HTTP/1.1\r\n" + HOST + b"\r\n", [200]),
        (b"\r\n" + post(JSON + b"Content-Length: %d\r\n" % len(BODY), BODY), [200]),
        ((b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n\r\n") * 3, [200, 200, 200]),
        (b"\r\n\r\nGET /version HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
        (b"\nGET /version HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
        (b"\r\n GET /version HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
        (b"\r\rGET /version HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_one_empty_line_before_a_request_is_skipped(server, data, expected, whole):
    """RFC 9112, 2.2: old clients end a body with a line end that its length does not count."""
    with server.connect() as sock:
        for piece in [data] if whole else [data[i : i + 1] for i in range(len(data))]:
            try:
                sock.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                break  # it has been refused
        got = b""
        while got.count(b"HTTP/1.1 ") < len(expected) or not got.rstrip().endswith(b"}"):
            piece = sock.recv(65536)
            assert piece, got[:300]
            got += piece
    assert [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]] == expected


NAMES = {
    "a space": " a",
    "a line end": "a\r\nx-injected: 1",
    "a NUL": "a\x00b",
    "not Latin-1": "\u540d\u524d",
    "Latin-1": "\u00e9t\u00e9",
    "a comma": "a, b",
    "a quote": 'a"b',
    "an escape": "\x1b[31m",
    "empty": "",
    "long": "n" * 10_000,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_header_of_names_is_one_valid_header(client, name, stream):
    """Response splitting by names of fields: the answer comes, and the header has no bytes of the client's choice."""
    answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "stream": stream, NAMES[name]: 1})
    assert answer.status_code == 200 and "x-injected" not in answer.headers
    shown = answer.headers["x-inferplane-ignored"]
    assert shown.isascii() and shown.isprintable() and len(shown) < 1000


@pytest.mark.parametrize("name", ["field%d", " field%d", "\u540d%d", "a\r\nb%d"])
def test_a_header_of_many_names_ends_with_a_whole_name(client, name):
    body = {"prompt": "x", "max_tokens": 1, **{name % i: 1 for i in range(10_000)}}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code in (200, 400), answer.text[:300]
    if answer.status_code == 200:
        shown = answer.headers["x-inferplane-ignored"]
        assert shown.isascii() and shown.isprintable() and len(shown) < 1000
        first = json.dumps(name % 0) if not (name % 0).isalnum() else name % 0
        assert shown.startswith(first), shown


FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "0.0.0.0",
    "10.0.0.1",
]
LOCAL = ["localhost", "LOCALHOST:8000", "localhost.", "app.localhost:1", "127.0.0.1", "127.9.9.9:80", "[::1]:8000", ""]


def ask_as(server: Live, host: str, head: str = "GET /v1/models") -> bytes:
    return talk(server, f"{head} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())


@pytest.fixture(scope="module")
def keyless():
    with Live("--health-port", "0", wait=False) as live:
        yield live


def test_a_local_server_without_keys_answers_local_names_only(keyless):
    """DNS rebinding: a web page's own name points at 127.0.0.1, and the browser lets the page read the answers."""
    for head in ("GET /v1/models", "GET /health", "POST /v1/completions", "GET /nowhere"):
        for host in FOREIGN:
            got = ask_as(keyless, host, head)
            assert status(got) == 403 and b'"unknown_host"' in got and b"--allowed-hosts" in got, (host, got[:300])
    for host in LOCAL:
        assert b"unknown_host" not in ask_as(keyless, host), host
    assert b"unknown_host" in ask_as(keyless, "localhost", "GET http://evil.example/v1/models")


@pytest.mark.parametrize(
    ("host", "names", "has_keys", "allowed", "refused"),
    [
        ("127.0.0.1", (), False, LOCAL, FOREIGN),
        ("localhost", (), False, LOCAL, FOREIGN),
        ("::1", (), False, LOCAL, FOREIGN),
        ("127.0.0.1", (), True, [*LOCAL, *FOREIGN], []),
        ("0.0.0.0", (), False, [*LOCAL, *FOREIGN], []),
        ("0.0.0.0", ("llm.example",), True, [*LOCAL, "llm.example:80", "LLM.example."], FOREIGN),
        ("127.0.0.1", ("evil.example",), False, [*LOCAL, *FOREIGN[:2]], FOREIGN[2:]),
        ("127.0.0.1", ("*",), False, [*LOCAL, *FOREIGN], []),
    ],
)
def test_names_are_checked_where_no_key_protects(host, names, has_keys, allowed, refused):
    is_allowed = host_check(ServerSettings(host=host, allowed_hosts=names), has_keys=has_keys) or (lambda name: True)
    assert [name for name in allowed if not is_allowed(name)] == []
    assert [name for name in refused if is_allowed(name)] == []


def test_after_a_flood_of_connections_with_few_descriptors_the_server_answers():
    """Descriptor exhaustion: the accept loop must neither die nor fill the log."""
    with Live(environment={}, descriptors=64) as live:
        assert live.event("fewer connections: too few open files allowed")["max_connections"] == 32
        held = [live.connect() for _ in range(300)]
        for sock in held:
            sock.close()
        assert healthy_within(live, 20.0)
        with live.client() as client:
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        live.at_rest()
        assert "Traceback" not in live.text and len(live.text) < 100_000
        assert live.stop() == 0


def healthy_within(live: Live, limit_s: float) -> bool:
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        try:
            if status(talk(live, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", timeout_s=limit_s)) == 200:
                return True
        except OSError:
            pass
    return False


@pytest.mark.parametrize(
    ("limit", "asked", "allowed"), [(64, 1024, 32), (40, 1024, 20), (1024, 1024, 960), (4096, 9, 9)]
)
def test_connections_leave_descriptors_for_the_server(monkeypatch, limit, asked, allowed):
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda kind: (limit, limit))
    assert descriptors.limit_connections(asked) == allowed


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ValueError("x"), None])
def test_errors_of_the_loop_are_a_line_a_second(caplog, monkeypatch, error):
    """A log that an attack fills is an attack on the disk."""
    monkeypatch.setattr(descriptors, "REPORT_EVERY_S", 0.01)
    monkeypatch.setattr(descriptors.log, "propagate", True)

    async def fail() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(descriptors.LoopErrors())
        for _ in range(1000):
            loop.call_exception_handler({"message": "accept failed", **({"exception": error} if error else {})})
        await asyncio.sleep(0.2)

    asyncio.run(fail())
    facts = [record.facts for record in caplog.records]
    assert [line.get("left_out") for line in facts] == [None, 999]
    assert all(line["what"] == "accept failed" for line in facts)
