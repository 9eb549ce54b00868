"""Faults around a live server: clients that leave at every point, exhausted resources, signals under load."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from inferplane.serving.lifecycle.run import ECHO_S
from tests.serving.live import Live, engine_pids
from tests.serving.test_life import LONG, leave, running, stream, wait_gone
from tests.serving.test_raw_socket import BODY, JSON, post

ACCEPTED = "inferplane:requests_accepted_total"
STREAMS = 50


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/compl", post(JSON)[:-2], post(JSON + b"Content-Length: 99\r\n"), post(JSON, BODY)[:-9]],
    ids=["before the headers", "in the request line", "in the headers", "before the body", "in the body"],
)
def test_leaving_before_the_request_is_whole_runs_nothing(server, sent):
    before = server.at_rest().get(ACCEPTED, 0)
    connections = [server.connect() for _ in range(5)]
    for sock in connections:
        sock.sendall(sent)
    for sock in connections:
        sock.close()
    assert server.at_rest().get(ACCEPTED, 0) == before


def test_leaving_with_the_last_token(server):
    before = server.at_rest()
    for _ in range(5):
        leave(server, {**LONG, "stream": True, "max_tokens": 3, "return_token_ids": True}, 3)
    after = server.at_rest()
    assert after[ACCEPTED] - before.get(ACCEPTED, 0) == 5
    assert ended(after) - ended(before) == 5


def ended(numbers: dict[str, float]) -> float:
    return sum(n for name, n in numbers.items() if name.startswith("inferplane:request_success_total"))


def test_sequences_are_preempted_when_the_cache_is_too_small():
    """Room for not quite three of eight sequences: all end, with the tokens they have alone."""
    sizes = ("--max-model-len", "176", "--kv-cache-bytes", str(13 * 2**17), "--max-num-seqs", "8")
    with Live(*sizes, "--deterministic") as server:
        most = server.metrics()["inferplane:kv_blocks_total"]
        assert 11 <= most < 12

        def tokens(i: int) -> list[int]:
            body = {**LONG, "prompt": f"def f{i % 4}(", "max_tokens": 56, "return_token_ids": True, "stream": False}
            with server.client() as client:
                answer = client.post("/v1/completions", json=body).raise_for_status().json()
            return answer["choices"][0]["token_ids"]

        alone = [tokens(i) for i in range(4)]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(tokens, range(8))) == alone * 2
        assert server.at_rest()["inferplane:num_preemptions_total"] > 0
        with server.client() as client:
            answer = client.post("/v1/completions", json={**LONG, "prompt": [5] * 170, "max_tokens": 10})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("drain_s", [120, 0])
def test_sigterm_under_load_loses_no_request(drain_s):
    """Streams run and wait; each gets a terminal event."""
    with Live("--max-num-seqs", "16", "--max-waiting", "64", "--drain-s", str(drain_s)) as server:
        with ThreadPoolExecutor(STREAMS) as pool:
            ends = [pool.submit(stream, server, max_tokens=24 if drain_s else 1200) for _ in range(STREAMS)]
            limit = time.monotonic() + 60
            while server.metrics()["inferplane:admitted_sequences"] < STREAMS:
                if drain_s and any(e.done() for e in ends):
                    break
                assert time.monotonic() < limit
                time.sleep(0.01)
            pids = engine_pids(server)
            server.process.send_signal(signal.SIGTERM)
            found = Counter(_fate(e.result()) for e in ends)
        assert sum(found.values()) == STREAMS
        assert set(found) <= ({"whole", "refused"} if drain_s else {"aborted", "refused"}), found
        assert found["whole" if drain_s else "aborted"] >= 16  # those that ran
        assert server.process.wait(60) == 0
        wait_gone(pids)


def _fate(answer: tuple[int, list[str]]) -> str:
    status, events = answer
    if status != 200:
        assert status == 503 and json.loads(events[0])["error"]["code"] in ("shutting_down", "aborted")
        return "refused"
    if events[-1] == "[DONE]":
        reasons = [json.loads(e)["choices"][0]["finish_reason"] for e in events[:-1]]
        assert [r for r in reasons if r] == ["length"]
        return "whole"
    assert "[DONE]" not in events
    return json.loads(events[-1])["error"]["code"]


def test_a_full_disk_under_the_log_loses_only_the_log():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "inferplane", "serve", "--device", "cpu", "--log-format", "json"]
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen([*command, "--port", str(port)], stdout=full, stderr=full) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        try:
            wait_ready(client, process)
            status = process_memory(process.pid)
            for _ in range(1000):
                assert client.get("/version", headers={"x-request-id": "x" * 100}).status_code == 200
            assert process_memory(process.pid) - status < 8 * 2**20  # lines that cannot be written are not kept
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
            assert answer.json()["usage"]["completion_tokens"] <= 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def wait_ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + 90
    while True:
        assert process.poll() is None and time.monotonic() < limit
        try:
            if client.get("/v2/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)


def process_memory(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_too_few_descriptors_keep_later_clients_waiting_and_nothing_more():
    with Live(descriptors=64) as server:
        held = []
        for _ in range(100):
            held.append(server.connect())
        time.sleep(0.5)
        assert server.process.poll() is None
        for sock in held:
            sock.close()
        limit = time.monotonic() + 30
        while True:
            try:
                with server.client() as client:
                    body = {"prompt": "x", "max_tokens": 2}
                    assert client.post("/v1/completions", json=body).status_code == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < limit
                time.sleep(0.1)
        server.at_rest()
        assert server.stop() == 0


def test_the_second_signal_under_load_leaves_nothing_behind():
    with Live("--max-num-seqs", "16", "--drain-s", "600") as server, ThreadPoolExecutor(16) as pool:
        for _ in range(16):
            pool.submit(stream, server)
        running(server, 16)
        pids = engine_pids(server)
        server.process.send_signal(signal.SIGTERM)
        server.event("draining")
        time.sleep(2 * ECHO_S)  # sooner it would be the first one's echo
        assert server.stop() == 128 + signal.SIGTERM
        wait_gone(pids)
        with socket.create_server((server.host, server.port)):
            pass
