"""Requests that no client library sends: each gets a 4xx or a closed connection, without effect on other clients."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time

import pytest

from tests.serving.live import Live

BODY = b'{"prompt": "x", "max_tokens": 1}'
HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"


def post(headers: bytes, body: bytes = b"", path: bytes = b"/v1/completions") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + headers + b"\r\n" + body


def sized(body: bytes, more: bytes = b"") -> bytes:
    return post(JSON + more + b"Content-Length: %d\r\n" % len(body), body)


def chunked(*chunks: bytes, more: bytes = b"") -> bytes:
    data = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks)
    return post(JSON + b"Transfer-Encoding: chunked\r\n" + more, data + b"0\r\n\r\n")


def talk(server: Live, data: bytes, *, half_close: bool = False, timeout_s: float = 20.0) -> bytes:
    """Send, and read until the server closes or has answered whole."""
    with server.connect() as sock:
        sock.settimeout(timeout_s)
        try:
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has heard enough
        return read_answer(sock)


def read_answer(sock: socket.socket) -> bytes:
    got = b""
    try:
        while piece := sock.recv(65536):
            got += piece
            head, _, body = got.partition(b"\r\n\r\n")
            length = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if length and len(body) >= length[0]:
                break
    except ConnectionResetError:
        pass
    return got


def status(answer: bytes) -> int:
    """0 for a connection that was closed without a word."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


CASES = {
    "no request at all": b"\x00\x01\x02\x03\r\n\r\n",
    "TLS where there is none": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 60 + b"\r\n\r\n",
    "no Host": b"POST /v1/completions HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "a space in the target": b"GET /hea lth HTTP/1.1\r\nHost: x\r\n\r\n",
    "a control character in the target": b"GET /hea\x01lth HTTP/1.1\r\nHost: x\r\n\r\n",
    "a NUL in a header": b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: a\x00b\r\n\r\n",
    "a bare CR in a header": b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: a\rb: c\r\n\r\n",
    "a header without a colon": b"GET /version HTTP/1.1\r\nHost: x\r\nnonsense\r\n\r\n",
    "a space before the colon": b"GET /version HTTP/1.1\r\nHost: x\r\nX-A : b\r\n\r\n",
    "a header of 100 KiB": b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n",
    "ten thousand headers": b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 10_000 + b"\r\n",
    "a target of 100 KiB": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "no length": post(JSON),
    "Content-Length -1": post(JSON + b"Content-Length: -1\r\n", BODY),
    "Content-Length abc": post(JSON + b"Content-Length: abc\r\n", BODY),
    "Content-Length +5": post(JSON + b"Content-Length: +32\r\n", BODY),
    "Content-Length twice, differing": post(JSON + b"Content-Length: 5\r\nContent-Length: 32\r\n", BODY),
    "Content-Length of 1 EiB": post(JSON + b"Content-Length: 1152921504606846976\r\n", BODY),
    "Content-Length of 10^30": post(JSON + b"Content-Length: 1" + b"0" * 30 + b"\r\n", BODY),
    "Content-Length too small": post(JSON + b"Content-Length: 5\r\n", BODY),
    "Content-Length and chunks": chunked(BODY, more=b"Content-Length: 5\r\n"),
    "chunks of a coding that is none": post(JSON + b"Transfer-Encoding: rot13\r\n", BODY),
    "chunks, chunked": post(JSON + b"Transfer-Encoding: chunked, chunked\r\n", BODY),
    "a chunk size that is none": post(JSON + b"Transfer-Encoding: chunked\r\n", b"zz\r\n{}\r\n0\r\n\r\n"),
    "a negative chunk size": post(JSON + b"Transfer-Encoding: chunked\r\n", b"-5\r\n{}\r\n0\r\n\r\n"),
    "a chunk size of 2^64": post(JSON + b"Transfer-Encoding: chunked\r\n", b"10000000000000000\r\n{}\r\n0\r\n\r\n"),
    "chunks beyond the limit": chunked(*[b"[" * 65536] * 80),
    "a body beyond the limit": sized(b" " * (4 * 2**20 + 1)),
    "a gzip bomb": sized(gzip.compress(b" " * 10_000_000), b"Content-Encoding: gzip\r\n"),
    "a form": post(b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 8\r\n", b"prompt=x"),
    "text that is JSON": post(b"Content-Type: text/plain\r\nContent-Length: %d\r\n" % len(BODY), BODY),
    "no type": post(b"Content-Length: %d\r\n" % len(BODY), BODY),
    "two types": sized(BODY, b"Content-Type: text/plain\r\n"),
    "invalid UTF-8": sized(b'{"prompt": "\xc3\x28"}'),
    "NaN": sized(b'{"prompt": "x", "temperature": NaN}'),
    "1e999": sized(b'{"prompt": "x", "temperature": 1e999}'),
    "2^64": sized(b'{"prompt": "x", "max_tokens": 18446744073709551616}'),
    "a number of 100,000 digits": sized(b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}"),
    "nesting of 100,000": sized(b'{"prompt": ' + b"[" * 100_000),
    "nesting of 100,000, whole": sized(b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a lone surrogate": sized(b'{"prompt": "\\ud800"}'),
    "no method that there is": b"BREW /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
    "DELETE": b"DELETE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
    "TRACE": b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT": b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a proxy's request": b"GET http://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n",
    "HTTP/2 at once": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("name", CASES)
def test_abuse_is_refused(server, name):
    answer = talk(server, CASES[name], half_close=True)
    assert status(answer) == 0 or 400 <= status(answer) < 500, answer[:300]
    with server.client() as client:
        assert client.get("/health").status_code == 200


def test_what_the_parser_lets_through_is_refused(server):
    assert status(talk(server, CASES["HTTP/9.9"])) == 400
    many = b"".join(b"X-%d: %b\r\n" % (i, b"a" * 4000) for i in range(9))  # whole in one piece: nothing to wait for
    assert status(talk(server, b"GET /health HTTP/1.1\r\n" + HOST + many + b"\r\n")) in (400, 431)


AMBIGUOUS = {
    "a length and chunks": chunked(BODY, more=b"Content-Length: %d\r\n" % len(BODY)),
    "chunks and a length": post(JSON + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
    "chunks in HTTP/1.0": chunked(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "an encoding before chunks": chunked(BODY).replace(b"chunked", b"gzip, chunked"),
    "two lengths, equal": sized(BODY, b"Content-Length: %d\r\n" % len(BODY)),
    "two lengths in one line": post(JSON + b"Content-Length: 32, 32\r\n", BODY),
    "a folded line": b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: b\r\n c\r\n\r\n",
    "a folded line with a tab": b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: b\r\n\tc\r\n\r\n",
    "bare line feeds": b"GET /version HTTP/1.1\nHost: x\n\n",
    "a bare line feed between headers": b"GET /version HTTP/1.1\r\nHost: x\nX-A: b\r\n\r\n",
    "a bare line feed at the end": b"GET /version HTTP/1.1\r\nHost: x\r\n\n",
    "a bare line feed before the end": b"GET /version HTTP/1.1\r\nHost: x\n\r\n",
    "a Host with a space": b"GET /version HTTP/1.1\r\nHost: a b\r\n\r\n",
    "a Host with a comma and a space": b"GET /version HTTP/1.1\r\nHost: a, b\r\n\r\n",
    "a Host with a path": b"GET /version HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "a Host with a user": b"GET /version HTTP/1.1\r\nHost: me@x\r\n\r\n",
    "a Host with a port that is none": b"GET /version HTTP/1.1\r\nHost: x:y\r\n\r\n",
    "two Hosts": CASES["two Hosts"],
    "no Host": b"GET /version HTTP/1.1\r\n\r\n",
    "an absolute target without a host": b"GET http:///version HTTP/1.1\r\nHost: x\r\n\r\n",
    "an absolute target with a user": b"GET http://me@x/version HTTP/1.1\r\nHost: x\r\n\r\n",
    "an absolute target of another scheme": b"GET ftp://x/version HTTP/1.1\r\nHost: x\r\n\r\n",
    "an absolute target with a fragment": b"GET http://x/version#a HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_two_servers_may_read_differently_is_refused_and_ends_the_connection(server, name):
    with server.connect() as sock:
        sock.sendall(AMBIGUOUS[name] + b"GET /version HTTP/1.1\r\nHost: smuggled\r\n\r\n")
        got = b""
        while piece := sock.recv(65536):  # until the server closes: the client does not
            got += piece
    assert got.startswith(b"HTTP/1.1 400 ") and got.count(b"HTTP/1.1 ") == 1, got[:300]
    assert b"connection: close" in got.lower()


@pytest.mark.parametrize("size", [b"8" + b"0" * 15, b"f" * 16, b"1" + b"0" * 16, b"f" * 18, b"f" * 20])
def test_a_chunk_that_64_bits_do_not_count_is_refused_at_once(server, size):
    for piece in (b"", b"{}"):
        got = talk(server, post(JSON + b"Transfer-Encoding: chunked\r\n", size + b"\r\n" + piece))
        assert status(got) == 400 and b"connection: close" in got.lower(), got[:300]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a Host with a path", "an invalid Host"),
        ("a length and chunks", "a body of two lengths"),
        ("two lengths, equal", "several lengths"),
        ("chunks in HTTP/1.0", "Transfer-Encoding in HTTP/1.0, which has none; send HTTP/1.1"),
        ("an encoding before chunks", "the only Transfer-Encoding that is read is chunked"),
        ("two Hosts", "several Host headers"),
        ("no Host", "Missing mandatory Host header"),
        ("a folded line", "a folded line"),
    ],
)
def test_the_refusal_of_malformed_http_is_json_with_the_reason(server, name, reason):
    head, _, body = talk(server, AMBIGUOUS[name]).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert b"content-type: application/json" in head.lower()
    assert reason in error["message"] and error["code"] == "malformed_http" and ".." not in error["message"]


@pytest.mark.parametrize(
    ("headers", "expected"), [(b"", 413), (b"Content-Encoding: gzip\r\n", 415), (b"Content-Type: text/plain\r\n", 415)]
)
@pytest.mark.parametrize("chunks", [False, True])
def test_a_client_that_sends_a_large_body_whole_gets_the_refusal(server, headers, expected, chunks):
    body = b" " * 12_000_000
    data = chunked(body, more=headers) if chunks else sized(body, headers)
    with server.connect() as sock:
        sock.settimeout(20)
        sock.sendall(data)  # all of it, before the first byte of the answer is read
        got = b""
        while piece := sock.recv(65536):
            got += piece
    assert status(got) == expected and b"connection: close" in got.lower(), got[:300]
    json.loads(got.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("head", [b"Host: x:8000", b"Host:", b"Host: [::1]:80", b"Host: a_b.example"])
def test_a_valid_host_is_accepted(server, head):
    assert status(talk(server, b"GET /version HTTP/1.1\r\n" + head + b"\r\n\r\n")) == 200


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"http://x/version", 200),
        (b"HTTP://another.example:81/version", 200),
        (b"https://[::1]/version?a=1", 200),
        (b"http://x", 404),
        (b"http://x?version", 404),
        (b"http://x//version", 404),
    ],
)
def test_an_absolute_target_is_served_as_its_path(server, target, expected):
    got = talk(server, b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
    assert status(got) == expected, got[:300]


def test_a_request_through_a_proxy_generates(server):
    assert status(talk(server, sized(BODY).replace(b"POST /", b"POST http://x:8000/"))) == 200


def test_there_are_enough_of_them():
    assert len(CASES) >= 40


def test_a_body_that_is_cut_short_runs_nothing(server):
    name = "inferplane:requests_accepted_total"
    before = server.metrics().get(name, 0)
    assert status(talk(server, post(JSON + b"Content-Length: 100\r\n", BODY), half_close=True)) in (0, 400)
    assert server.at_rest().get(name, 0) == before


def test_an_upgrade_is_not_taken_up(server):
    for protocol in (b"h2c", b"websocket"):
        head = (
            b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + protocol + b"\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
        )
        assert status(talk(server, b"GET /health HTTP/1.1\r\n" + HOST + head + b"\r\n")) == 200


def test_pipelined_requests_are_answered_in_their_order(server):
    paths = [b"/version", b"/nowhere", b"/health"]
    data = b"".join(b"GET " + p + b" HTTP/1.1\r\n" + HOST + b"\r\n" for p in paths)
    with server.connect() as sock:
        sock.sendall(data)
        got = b""
        while got.count(b"HTTP/1.1 ") < 3 or not got.rstrip().endswith(b"}"):
            got += sock.recv(65536)
    assert [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]] == [200, 404, 200]


def test_a_log_line_is_one_line(server):
    path = "/evil%0a%7B%22event%22%3A%22forged%22%7D%1b%5b31m%E2%80%AE"
    after = len(server.log)
    talk(server, f"GET {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\tb\r\n\r\n".encode())
    limit = time.monotonic() + 20
    while not (lines := [e for e in server.log[after:] if "/evil" in str(e.get("path"))]):
        assert time.monotonic() < limit
        time.sleep(0.01)
    (line,) = lines
    assert "\\x0a" in line["path"] and "\x1b" not in json.dumps(line, ensure_ascii=False)
    assert not any(e["event"] == "forged" for e in server.log)
    assert "\u202e" not in server.text


def test_prompts_are_not_logged(server):
    with server.client() as client:
        for body in (
            {"prompt": "sesame-open", "max_tokens": 1},
            {"prompt": ["sesame-open", 5]},
            {"text": "sesame-open"},
        ):
            client.post("/v1/completions", json={**body, "max_dec_len": 2} if "text" in body else body)
        client.post(
            "/v1/completions", content=b'{"prompt": "sesame-open"', headers={"content-type": "application/json"}
        )
    server.at_rest()
    assert "sesame" not in server.text


def test_request_ids_come_back_if_they_are_harmless(server):
    with server.client() as client:
        assert client.get("/health", headers={"x-request-id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
        for bad in ("a b", "é".encode(), "x" * 129, ""):
            given = client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
            assert len(given) == 32


def test_slow_clients_are_disconnected_and_delay_no_one():
    with Live("--header-timeout-s", "1", "--body-timeout-s", "1", "--max-connections", "64") as server:
        slow = [server.connect() for _ in range(40)]
        stop = threading.Event()

        def drip() -> None:
            for i in range(200):
                for n, sock in enumerate(slow):
                    data = (
                        b"X-A: b\r\n"
                        if i
                        else (b"GET /version HTTP/1.1\r\n" if n % 2 else post(JSON + b"Content-Length: 99\r\n"))
                    )
                    try:
                        sock.sendall(data[:1] if i else data)
                    except OSError:
                        continue
                if stop.wait(0.2):
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with server.client() as client:
                assert client.get("/health").status_code == 200
            limit = time.monotonic() + 20
            for sock in slow:
                sock.settimeout(max(0.1, limit - time.monotonic()))
                answer = read_answer(sock)
                assert status(answer) in (0, 408), answer
        finally:
            stop.set()
            dripping.join()
            for sock in slow:
                sock.close()
        # Beyond the limit of connections one is closed without a word; those that are there go on.
        many = [server.connect() for _ in range(64)]
        try:
            assert talk(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") == b""
        finally:
            for sock in many:
                sock.close()
        with server.client() as client:
            for _ in range(50):
                try:
                    assert client.get("/health").status_code == 200
                    break
                except Exception:
                    time.sleep(0.1)
            else:
                raise AssertionError("connections that were closed still count")
