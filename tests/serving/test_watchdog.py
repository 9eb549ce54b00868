"""Requests end in time whatever happens to the processes behind the server.

The class of advisories: denial of service by a component that hangs, because limits of time are kept by the component
that they are for. An engine, a template renderer or a compiler of constraints that is stopped says nothing at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.live import Live, engine_pids
from tests.serving.test_life import LONG, running, wait_gone
from tests.serving.test_workers import all_ready, workers

LIMIT_S, ALLOWED_S = 2.0, 5.0
"""The limit of the requests here, and how much later than that each has to end at the latest."""
ACCEPTED, ENDED = "inferplane:server_requests_accepted_total", "inferplane:server_requests_ended_total"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1200}


def family(numbers: dict[str, float], name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(value for key, value in numbers.items() if key.startswith(name))


def all_ended(server: Live) -> dict[str, float]:
    """The numbers of a server at rest, with as many requests ended as accepted."""
    numbers = server.at_rest()
    assert family(numbers, ACCEPTED) == family(numbers, ENDED)
    return numbers


def children(pid: int) -> list[int]:
    """All processes that a process has started, and theirs."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found += [int(folder.name), *children(int(folder.name))]
    return found


def engine_pid(server: Live) -> int:
    """The process with the model."""
    (found,) = [pid for pid in engine_pids(server) if b"process.server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes stand still inside the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def ask(server: Live, path: str, body: dict[str, Any]) -> tuple[int, str, float]:
    """The status of an answer, its text, and the seconds that it took."""
    begun = time.monotonic()
    with server.client() as client:
        answer = client.post(path, json=body)
    return answer.status_code, answer.text, time.monotonic() - begun


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with Live("--max-num-seqs", "4", "--max-waiting", "8") as live:
        yield live
        all_ended(live)
        assert live.stop() == 0


@pytest.fixture(scope="module")
def strict() -> Iterator[Live]:
    """A server whose own limit is short."""
    with Live("--max-num-seqs", "4", "--request-timeout-s", str(LIMIT_S), "--drain-s", "1") as live:
        yield live


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/v1/completions", LONG),
    "several": ("/v1/completions", {**LONG, "n": 3}),
    "stream": ("/v1/completions", {**LONG, "stream": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "native": ("/v1/completions", {"text": "x = [", "max_dec_len": 1200, "min_dec_len": 1200}),
    "native stream": ("/v1/completions", {"text": "x", "max_dec_len": 1200, "min_dec_len": 1200, "stream": True}),
    "constraint": ("/v1/completions", {"prompt": "x", "max_tokens": 1200, "regex": "(a|b){2000}"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_s_own_limit_holds_while_the_engine_is_stopped(server, kind):
    path, body = KINDS[kind]
    server.at_rest()
    with stopped(engine_pid(server)):
        status, text, took = ask(server, path, {**body, "timeout": LIMIT_S})
    assert LIMIT_S <= took < LIMIT_S + ALLOWED_S
    if status == 200:  # the head of a stream was sent before
        assert "stream" in kind and "time limit" in text
    else:
        assert status == 408 and "its own time limit, 2 s" in text
    assert family(all_ended(server), f'{ENDED}{{outcome="timeout"}}') > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_s_limit_holds_while_the_engine_is_stopped(strict, kind):
    path, body = KINDS[kind]
    strict.at_rest()
    with stopped(engine_pid(strict)):
        status, text, took = ask(strict, path, body)
    assert LIMIT_S <= took < LIMIT_S + ALLOWED_S
    assert status == 504 or (status == 200 and "stream" in kind)
    assert "this server's time limit" in text
    all_ended(strict)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/completions", "/v1/chat/completions/completions"])
def test_a_running_stream_and_those_behind_it_end_in_time(server, path):
    """Some have sent tokens, some wait in the engine, some arrive while it is stopped."""
    server.at_rest()
    body = {"input": "x"} if path.endswith("embeddings") else LONG
    with ThreadPoolExecutor(9) as pool:
        long = {**LONG, "stream": True, "timeout": 4 * LIMIT_S}
        before = [pool.submit(ask, server, "/v1/completions", long) for _ in range(6)]
        running(server, 4)
        with stopped(engine_pid(server)):
            after = [pool.submit(ask, server, path, {**body, "timeout": LIMIT_S}) for _ in range(3)]
            for future in after:
                status, text, took = future.result()
                assert status == 408 and took < LIMIT_S + ALLOWED_S, text
            for future in before:
                status, text, took = future.result()
                assert "time limit" in text and took < 4 * LIMIT_S + ALLOWED_S
    all_ended(server)


def test_slots_that_a_stopped_engine_holds_are_not_handed_out_and_not_lost(server):
    server.at_rest()
    with stopped(engine_pid(server)):
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(ask, server, "/v1/completions", {**LONG, "timeout": LIMIT_S}) for _ in range(12)]
            assert [future.result()[0] for future in asked] == [408] * 12
        status, text, took = ask(server, "/v1/completions", LONG)
        assert status == 429 and json.loads(text)["error"]["code"] == "queue_full" and took < ALLOWED_S
    all_ended(server)
    assert ask(server, "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_a_client_that_leaves_a_stopped_engine_s_stream_is_let_go(server):
    before = server.at_rest()
    data = json.dumps({**LONG, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    with server.connect() as sock:
        sock.sendall(head % len(data) + data)
        running(server, 1)
        with stopped(engine_pid(server)):
            sock.close()
            time.sleep(0.5)
    after = all_ended(server)
    gone = f'{ENDED}{{outcome="disconnect"}}'
    assert after[gone] - before.get(gone, 0) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "native"])
def test_a_stopped_template_process_ends_no_request_late(server, path):
    """It is killed after its own limit, and its successor serves the next request."""
    body: dict[str, Any] = {"text": "x", "max_dec_len": 2} if path == "native" else {**CHAT, "max_tokens": 2}
    target = "/v1/completions" if path == "native" else path
    if path == "/tokenize":
        del body["max_tokens"]
    assert ask(server, target, body)[0] == 200
    others = [pid for pid in engine_pids(server) if pid != engine_pid(server)]
    assert others
    with stopped(*others):
        status, text, took = ask(server, target, body if path == "/tokenize" else {**body, "timeout": 1})
        assert status in (400, 408) and took < LIMIT_S + ALLOWED_S, text
    assert ask(server, target, body)[0] == 200
    all_ended(server)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_constraint_process_that_is_stopped_or_killed_ends_no_request_late(server, number):
    body = {"prompt": "x", "max_tokens": 2, "timeout": LIMIT_S}
    assert ask(server, "/v1/completions", {**body, "regex": f"a|{number:d}"})[0] == 200
    pids = children(engine_pid(server))
    assert pids
    for pid in pids:
        os.kill(pid, number)
    status, text, took = ask(server, "/v1/completions", {**body, "regex": f"a|b|{number:d}"})
    assert status in (200, 400, 408) and took < LIMIT_S + ALLOWED_S, text
    all_ended(server)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[0], signal.SIGKILL)


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("fault", ["idle", "streams", "with its children", "with a template process"])
def test_sigterm_ends_a_server_whose_engine_is_stopped(fault):
    with Live("--max-num-seqs", "4", "--drain-s", "1") as server, ThreadPoolExecutor(4) as pool:
        if fault == "with its children":
            assert ask(server, "/v1/completions", {"prompt": "x", "max_tokens": 1, "regex": "a"})[0] == 200
        if fault == "with a template process":
            assert ask(server, "/v1/chat/completions", {**CHAT, "max_tokens": 1})[0] == 200
        streams = []
        if fault == "streams":
            streams = [pool.submit(ask, server, "/v1/completions", {**LONG, "stream": True}) for _ in range(3)]
            running(server, 3)
        pids = children(server.process.pid)
        with stopped(*pids):
            begun = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - begun < 1 + ALLOWED_S
            wait_gone(pids)
        for future in streams:
            status, text, _ = future.result()
            assert status == 200 and '"aborted"' in text
        told = server.event("ended")
        assert told["requests_accepted"] == told["requests_ended"] == (fault != "idle" and max(len(streams), 1))
        with socket.create_server((server.host, server.port)):
            pass


def test_a_second_signal_leaves_no_stopped_engine_behind():
    with Live("--drain-s", "60") as server, ThreadPoolExecutor(1) as pool:
        held = pool.submit(ask_anyhow, server)
        running(server, 1)
        pids = children(server.process.pid)
        with stopped(*pids):
            server.process.send_signal(signal.SIGTERM)
            server.event("draining")
            time.sleep(1)
            assert server.stop() == 128 + signal.SIGTERM
            wait_gone(pids)
        held.result()


def ask_anyhow(server: Live) -> None:
    with contextlib.suppress(Exception):
        ask(server, "/v1/completions", {**LONG, "stream": True})


def test_a_worker_that_is_stopped_or_killed_keeps_no_server_and_no_count():
    with Live("--http-workers", "3", "--drain-s", "1") as server, ThreadPoolExecutor(12) as pool:
        all_ready(server, 3)
        held = [pool.submit(ask_anyhow, server) for _ in range(12)]
        running(server, 12)
        first, second = workers(server)
        os.kill(first, signal.SIGKILL)
        server.event("a worker ended")
        pids = children(server.process.pid)
        with stopped(second):
            begun = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - begun < 1 + ALLOWED_S
        wait_gone(pids)
        for future in held:
            future.result()
        told = server.event("ended", requests_accepted=12)
        assert told["requests_ended"] == 12
