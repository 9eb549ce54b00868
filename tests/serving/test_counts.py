"""Every refusal is counted, in every process; each process reports the same totals."""

from __future__ import annotations

import ast
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

import inferplane.serving
from inferplane.serving.shared_state.counters import (
    COUNTER_LABELS,
    NUM_CELLS,
    OTHER,
    REASONS,
    REJECTED,
    RequestCounters,
)
from inferplane.serving.shared_state.shared_counters import SharedCounters
from inferplane.serving.shared_state.slots import SLOTS_CELL
from tests.serving.live import Live
from tests.serving.test_grpc import address, call, raw, string
from tests.serving.test_workers import all_ready

KEY = {"authorization": "Bearer k"}
JSON = {**KEY, "content-type": "application/json"}


def codes(folder: Path) -> set[str]:
    """Every `code` that an ApiError of these sources is made with."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                given = [k.value for k in node.keywords if k.arg == "code"] if node.func.id == "ApiError" else []
                given += node.args[2:3] if node.func.id == "invalid" else []
                found |= {n.value for g in given for n in ast.walk(g) if isinstance(n, ast.Constant)}
    return found


def test_every_reason_has_a_counter():
    found = codes(Path(inferplane.serving.__file__).parent)
    assert "queue_full" in found and "invalid_json" in found and len(found) > 20
    assert found <= set(REASONS) | {None}
    assert len(set(COUNTER_LABELS)) == len(COUNTER_LABELS)


def test_processes_share_their_counts_and_keep_those_of_one_that_ended():
    shared_counters = SharedCounters(3, NUM_CELLS)
    one, other = RequestCounters(shared_counters), RequestCounters(SharedCounters(3, NUM_CELLS, shared_counters.fd), 2)
    one.add(REJECTED, "queue_full")
    other.add(REJECTED, "queue_full", 2)
    other.add(REJECTED, "a code that nobody knows")
    shared_counters.write(2, SLOTS_CELL, 0)
    again = RequestCounters(shared_counters, 2)
    again.add(REJECTED, "queue_full")
    assert one[REJECTED, "queue_full"] == other[REJECTED, "queue_full"] == 4
    assert dict(one.items()) == {(REJECTED, "queue_full"): 4, (REJECTED, OTHER): 1}
    assert shared_counters.sum(SLOTS_CELL) == 0


@pytest.fixture(scope="module")
def several() -> Iterator[Live]:
    options = ["--http-workers", "2", "--api-key", "k", "--grpc-port", "0", "--metrics-port", "0"]
    with Live(*options, "--max-body-bytes", "2048", "--body-timeout-s", "0.5") as live:
        all_ready(live, 2)
        yield live
        live.at_rest()
        assert live.stop() == 0


def rejected(live: Live, port: int | None = None) -> dict[str, float]:
    """Refusals by their reason, over a connection of its own: any process may answer."""
    url = f"http://{live.host}:{port or live.port}/metrics"
    lines = httpx.get(url, headers=KEY, timeout=60).raise_for_status().text.splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith(f"inferplane:{REJECTED}{{"))
    return {name.split('"')[1]: float(value) for name, _, value in found}


def send(live: Live, head: str, body: bytes = b"") -> bytes:
    """The answer to these bytes."""
    with live.connect() as sock:
        sock.sendall(head.replace("\n", "\r\n").encode() + body)
        found = b""
        while part := sock.recv(4096):
            found += part
            if found.startswith(b"HTTP/1.1 2"):
                break
        return found


def wire(live: Live, times: int) -> None:
    """Cause each kind of refusal over HTTP a number of times, each over its own connection."""
    line = "POST /v1/completions HTTP/1.1\nHost: localhost\nConnection: close\nContent-Type: application/json\n"
    auth = "Authorization: Bearer k\n"
    body = json.dumps({"prompt": "x", "temperature": -1}).encode()
    for _ in range(times):
        assert b" 401 " in send(live, f"{line}Content-Length: 0\n\n")
        assert b" 408 " in send(live, f"{line}{auth}Content-Length: 9\n\n", b"{")
        assert b" 413 " in send(live, f"{line}{auth}Content-Length: 99999\n\n")
        assert b" 415 " in send(live, f"{line.replace('json', 'xml')}{auth}Content-Length: 2\n\n", b"{}")
        assert b" 415 " in send(live, f"{line}{auth}Content-Encoding: gzip\nContent-Length: 2\n\n", b"{}")
        assert b" 431 " in send(live, f"{line}{auth}X-Long: {'x' * 33000}\n\n")
        assert b" 400 " in send(live, f"{line}{auth}Content-Length: {len(body)}\n\n", body)
        assert b" 400 " in send(live, "NONSENSE\n\n")
        for path, code in (("/tokenize", 400), ("/detokenize", 400), ("/none", 404), ("/v1/models/none", 404)):
            method = "GET" if "models" in path else "POST"
            answer = httpx.request(method, live.url + path, headers=JSON, content=b"{}" if method == "POST" else None)
            assert answer.status_code == code, path


def test_every_refusal_over_http_is_counted_once_and_every_process_reports_all(several):
    before = rejected(several)
    wire(several, 4)
    told = [rejected(several, several.ports["metrics"]), *(rejected(several) for _ in range(12))]
    assert all(t == told[0] for t in told)
    new = {reason: n - before.get(reason, 0) for reason, n in told[0].items()}
    assert {reason: n for reason, n in new.items() if n} == {
        "invalid_api_key": 4,
        "body_timeout": 4,
        "body_too_large": 4,
        "unsupported_media_type": 4,
        "unsupported_encoding": 4,
        "headers_too_large": 4,
        "invalid_value": 4,
        "malformed_http": 4,
        "missing_required_parameter": 8,
        "http_error": 4,
        "model_not_found": 4,
    }


def test_refusals_over_grpc_are_counted(several):
    before = rejected(several)
    right = [("authorization", "Bearer k")]
    text = ("text_input", "BYTES", [1], string(b"x"))
    with grpc.insecure_channel(address(several)) as channel:
        for method, metadata, fields in (
            ("ModelInfer", [], raw(text)),
            ("ModelMetadata", [("authorization", "Bearer wrong")], {}),
            ("ModelInfer", right, raw(("text_input", "BYTES", [2], string(b"x")))),
            ("ModelInfer", right, raw(text, ("max_tokens", "INT32", [1], struct.pack("<i", 10**6)))),
            ("ModelInfer", right, {**raw(text), "model_name": "none"}),
            ("ModelMetadata", right, {"name": "none"}),
        ):
            with pytest.raises(grpc.RpcError):
                call(channel, method, metadata=metadata, **fields)
    after = rejected(several)
    new = {reason: n - before.get(reason, 0) for reason, n in after.items() if n - before.get(reason, 0)}
    assert new == {"invalid_api_key": 2, "invalid_value": 1, "context_length_exceeded": 1, "model_not_found": 2}


def test_an_engine_refusal_is_counted_and_not_as_a_disconnect(several):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": schema, "n": 2}
    before, aborted = rejected(several), several.metrics().get(ABORTED, 0)
    answer = httpx.post(f"{several.url}/v1/chat/completions", headers=KEY, json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert rejected(several)["invalid_value"] == before.get("invalid_value", 0) + 1
    assert several.metrics().get(ABORTED, 0) == aborted


ABORTED = 'inferplane:requests_aborted_total{cause="disconnect"}'


def test_an_id_lives_once_over_all_processes(several):
    body: dict[str, Any] = {"text": "x = [", "req_id": "twice", "max_dec_len": 1500, "min_dec_len": 1500}
    url = f"{several.url}/v1/completions"
    refused: list[tuple[int, Any]] = []
    ended = threading.Event()

    def long() -> None:
        with httpx.stream("POST", url, headers=KEY, json={**body, "stream": True}, timeout=120) as first:
            for _ in first.iter_lines():
                if ended.is_set():
                    return

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(long)
        limit = time.monotonic() + 60
        while several.metrics()["inferplane:num_requests_running"] < 1 and time.monotonic() < limit:
            time.sleep(0.01)
        for _ in range(16):  # each over a connection of its own: either process
            answer = httpx.post(url, headers=KEY, json={**body, "max_dec_len": 2, "min_dec_len": 1}, timeout=60)
            refused.append((answer.status_code, answer.json().get("req_id")))
        with grpc.insecure_channel(address(several)) as channel:
            fields = raw(("text_input", "BYTES", [1], string(b"x")), id="twice")
            with pytest.raises(grpc.RpcError) as by_grpc:
                call(channel, "ModelInfer", metadata=[("authorization", "Bearer k")], **fields)
        assert not running.done()
        ended.set()
        running.result()
    assert refused == [(409, "twice")] * 16
    assert by_grpc.value.code() is grpc.StatusCode.ALREADY_EXISTS
    several.at_rest()
    answer = httpx.post(url, headers=KEY, json={**body, "max_dec_len": 2, "min_dec_len": 1}, timeout=60)
    assert answer.status_code == 200


def test_connections_beyond_the_limit_are_counted():
    with Live("--max-connections", "8", "--header-timeout-s", "300") as live:
        limit = time.monotonic() + 60
        with contextlib.ExitStack() as opened:
            socks = [opened.enter_context(live.connect()) for _ in range(12)]
            while (ended := sum(closed(sock) for sock in socks)) < 4:
                assert time.monotonic() < limit
            assert ended == 4
        while True:  # until the server has seen that they left
            with contextlib.suppress(httpx.HTTPError):
                assert live.metrics()[f'inferplane:{REJECTED}{{reason="too_many_connections"}}'] >= 4
                return
            assert time.monotonic() < limit


def closed(sock: socket.socket) -> bool:
    """Whether the server has closed a connection on which nothing was sent."""
    sock.settimeout(0.05)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True
