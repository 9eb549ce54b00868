"""Clients that misbehave on the connection: what they send is slow, too much, never read, or no HTTP."""

from __future__ import annotations

import contextlib
import gzip
import socket
import time
from collections.abc import Iterator
from random import Random

from tests.serving.attack.target import CHAT, CLOSED, COMPLETIONS, JSON, Target, end_writing, read_status, reset, write
from tests.serving.test_raw_socket import AMBIGUOUS, CASES

STREAM = {"prompt": "x = [", "max_tokens": 300, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def connections(target: Target, count: int, receive_bytes: int = 0) -> Iterator[list[socket.socket]]:
    """So many connections, closed at the end."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(target.connect(receive_bytes)) for _ in range(count)]


def drip(target: Target, begin: bytes, piece: bytes, count: int = 16) -> list[int]:
    """Send a beginning, then a piece every 0.1 s as long as clients hold on; the statuses, or `CLOSED`."""
    with connections(target, count) as socks:
        limit = time.monotonic() + target.hold_s
        for sock in socks:
            write(sock, begin)
        while time.monotonic() < limit:
            for sock in socks:
                write(sock, piece)
            time.sleep(0.1)
        for sock in socks:
            end_writing(sock)
        return [read_status(sock) for sock in socks]


def send_tiny_chunks_without_key(target: Target, draw: Random) -> list[int]:
    head = target.head("POST", draw.choice(("/health", COMPLETIONS)), b"Transfer-Encoding: chunked\r\n", has_key=False)
    return target.ask_at_once([head + b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n"] * 8)


def send_tiny_chunks(target: Target, draw: Random) -> list[int]:
    head = target.head("POST", draw.choice((COMPLETIONS, CHAT)), JSON + b"Transfer-Encoding: chunked\r\n")
    return target.ask_at_once([head + b"1\r\n \r\n" * 40_000 + b"0\r\n\r\n"] * 8)


def send_chunks_with_extensions(target: Target, draw: Random) -> list[int]:
    head = target.head("POST", COMPLETIONS, JSON + b"Transfer-Encoding: chunked\r\n")
    chunk = b"40;" + b"a" * draw.choice((10, 1000, 60_000)) + b"\r\n" + b" " * 64 + b"\r\n"
    return target.ask_at_once([head + chunk * (400_000 // len(chunk)) + b"0\r\n\r\n"] * 4)


def send_slow_headers(target: Target, draw: Random) -> list[int]:
    return drip(target, b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: ", b"a")


def send_slow_body(target: Target, draw: Random) -> list[int]:
    return drip(target, target.head("POST", COMPLETIONS, JSON + b"Content-Length: 4096\r\n"), b" ")


def half_close_bodies(target: Target, draw: Random) -> list[int]:
    data = target.post(COMPLETIONS, STREAM)
    return target.ask_at_once([data[: draw.randrange(10, len(data))] for _ in range(16)], half_close=True)


def hold_idle_connections(target: Target, draw: Random) -> list[int]:
    with connections(target, 64) as socks:
        time.sleep(target.hold_s)
        for sock in socks:
            end_writing(sock)
        return [read_status(sock) for sock in socks]


def open_and_reset(target: Target, draw: Random) -> list[int]:
    for i in range(200):
        sock = target.connect()
        if i % 2:
            write(sock, target.post(COMPLETIONS, STREAM)[: draw.randrange(500)])
        reset(sock)
    return [CLOSED]


def read_slowly(target: Target, draw: Random) -> list[int]:
    """Eight bytes every 0.1 s of a long answer."""
    body = {**STREAM, "logprobs": 5, "n": 2}
    with connections(target, 4, receive_bytes=2048) as socks:
        limit = time.monotonic() + target.hold_s
        for sock in socks:
            write(sock, target.post(COMPLETIONS, body))
        heads = [b""] * len(socks)
        while time.monotonic() < limit:
            for i, sock in enumerate(socks):
                with contextlib.suppress(OSError):
                    heads[i] += sock.recv(8)
            time.sleep(0.1)
        for sock in socks:
            reset(sock)
    return [int(head[9:12]) if len(head) >= 12 else CLOSED for head in heads]


def never_read_streams(target: Target, draw: Random) -> list[int]:
    with connections(target, 6, receive_bytes=2048) as socks:
        for sock in socks:
            write(sock, target.post(COMPLETIONS, {**STREAM, "logprobs": 5, "n": 4}))
        time.sleep(target.hold_s)
        return [read_status(sock) for sock in socks]


def never_read_answers(target: Target, draw: Random) -> list[int]:
    """Requests one after the other on a connection whose answers are not read."""
    head = target.head("GET", "/openapi.json").replace(b"Connection: close\r\n", b"")
    with connections(target, 4, receive_bytes=2048) as socks:
        for sock in socks:
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.send(head * 200)
        time.sleep(target.hold_s)
        for sock in socks:
            reset(sock)
    return [CLOSED]


def leave_streams(target: Target, draw: Random) -> list[int]:
    """Leave after the first tokens, by an end or a reset."""
    found = []
    for _ in range(6):
        sock = target.connect()
        write(sock, target.post(COMPLETIONS, {**STREAM, "max_tokens": 1500, "n": 2}))
        first = sock.recv(100)
        found.append(int(first[9:12]) if first else CLOSED)
        (reset if draw.random() < 0.5 else socket.socket.close)(sock)
    return found


def leave_before_answers(target: Target, draw: Random) -> list[int]:
    for _ in range(20):
        with target.connect() as sock:
            write(sock, target.post(draw.choice((COMPLETIONS, "/tokenize")), {**STREAM, "prompt": "x " * 500}))
            time.sleep(draw.choice((0, 0.001, 0.01)))
    return [CLOSED]


def pipeline_requests(target: Target, draw: Random) -> list[int]:
    one = target.head("GET", "/v1/models").replace(b"Connection: close\r\n", b"")
    return target.ask_at_once([one * 100 + target.head("GET", "/nowhere")] * 2)


def pipeline_completions(target: Target, draw: Random) -> list[int]:
    one = target.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).replace(b"Connection: close\r\n", b"")
    return target.ask_at_once([one * 20 + target.head("GET", "/nowhere")] * 2)


def send_malformed_requests(target: Target, draw: Random) -> list[int]:
    return target.ask_at_once([target.with_key(data) for data in draw.sample([*CASES.values()], 12)], half_close=True)


def send_ambiguous_requests(target: Target, draw: Random) -> list[int]:
    smuggled = b"GET /version HTTP/1.1\r\nHost: smuggled\r\n\r\n"
    return target.ask_at_once([target.with_key(data) + smuggled for data in draw.sample([*AMBIGUOUS.values()], 12)])


def send_foreign_hosts(target: Target, draw: Random) -> list[int]:
    names = (
        b"evil.example",
        b"127.0.0.1.evil.example",
        b"localhost.evil.example",
        b"169.254.169.254",
        b"[::ffff:8.8.8.8]",
    )
    head = target.head("GET", "/v1/models")
    return target.ask_at_once(head.replace(b"Host: localhost", b"Host: " + name) for name in names)


def send_huge_headers(target: Target, draw: Random) -> list[int]:
    more = (b"X-A: " + b"a" * 300_000 + b"\r\n", b"X-A: b\r\n" * 30_000, b"Cookie: " + b"a=b; " * 40_000 + b"\r\n")
    return target.ask_at_once(target.head("GET", "/version", m) for m in more)


def send_long_targets(target: Target, draw: Random) -> list[int]:
    paths = ("/" + "a" * 200_000, "/v1/models/" + "%2e%2e%2f" * 3000, "/version?" + "a=b&" * 7000)
    return target.ask_at_once(target.head("GET", path) for path in paths)


def try_keys(target: Target, draw: Random) -> list[int]:
    found = []
    for _ in range(40):
        key = target.key[: draw.randrange(len(target.key))] + draw.choice(("", "x", "\u00e9", " ", "x" * 20_000))
        head = target.head("GET", "/v1/models", has_key=False)
        more = f"Authorization: Bearer {key}\r\n\r\n".encode()
        found.append(target.exchange(head[:-2] + more))
    return found


def try_paths_without_key(target: Target, draw: Random) -> list[int]:
    paths = (
        "/health/",
        "//health",
        "/Health",
        "/health%2f..%2fv1/models",
        "/v1/models;x=/health",
        "/health/../metrics",
    )
    return target.ask_at_once(target.head("GET", path, has_key=False) for path in paths)


def walk_unknown_paths(target: Target, draw: Random) -> list[int]:
    names = [f"/{draw.randrange(10**9)}/.env" for _ in range(30)]
    return target.ask_at_once(target.head(draw.choice(("GET", "POST", "HEAD")), name) for name in names)


def send_other_methods(target: Target, draw: Random) -> list[int]:
    methods = ("DELETE", "PUT", "PATCH", "TRACE", "BREW", "PROPFIND", "X" * 5000)
    return target.ask_at_once(target.head(method, COMPLETIONS) for method in methods)


def upgrade_connections(target: Target, draw: Random) -> list[int]:
    more = b"Upgrade: %s\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    heads = [target.head("GET", COMPLETIONS, more % name) for name in (b"websocket", b"h2c", b"TLS/1.0")]
    return target.ask_at_once(h.replace(b"Connection: close", b"Connection: close, Upgrade") for h in heads)


def send_other_protocols(target: Target, draw: Random) -> list[int]:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" * 1000
    noise = draw.randbytes(50_000)
    tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise
    return target.ask_at_once([preface, tls, noise, b"*3\r\n$3\r\nSET\r\n" * 1000, b"\0" * 100_000], half_close=True)


def send_compressed_bodies(target: Target, draw: Random) -> list[int]:
    bomb = gzip.compress(b" " * 10_000_000)
    codings = (b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip", b"identity, gzip")
    return target.ask_at_once(target.post(COMPLETIONS, bomb, b"Content-Encoding: " + c + b"\r\n") for c in codings)


def send_bodies_where_none_belong(target: Target, draw: Random) -> list[int]:
    more = b"Content-Length: 3000000\r\n"
    paths = ("/health", "/metrics", "/v1/models", "/version", "/status")
    return target.ask_at_once(target.head("GET", path, more) + b"[" * 3_000_000 for path in paths)
