"""Requests end in time, and are counted to their end, when memory, descriptors or disk run out or the clock is moved.

The class of advisories: denial of service by exhausted resources, after which a server neither answers nor ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest

from tests.serving.live import Live
from tests.serving.test_edge import healthy_within
from tests.serving.test_faults import wait_ready
from tests.serving.test_grpc import address, call, raw, string
from tests.serving.test_life import LONG, running, wait_gone
from tests.serving.test_watchdog import ALLOWED_S, LIMIT_S, all_ended, ask, children, engine_pid, stopped

SHORT = {"prompt": "x", "max_tokens": 2, "timeout": LIMIT_S}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with Live("--max-num-seqs", "4", "--grpc-port", "0", "--request-timeout-s", str(LIMIT_S)) as live:
        yield live
        all_ended(live)
        assert live.stop() == 0


@pytest.mark.parametrize("own", [None, 1_000_000], ids=["the server's limit", "the client's limit"])
@pytest.mark.parametrize("form", ["typed", "native"])
def test_grpc_calls_exceed_their_deadline_while_the_engine_is_stopped(server, form, own):
    given = json.dumps({"text": "x", "max_dec_len": 900, "min_dec_len": 900}).encode() if form == "native" else b"x"
    fields = raw(("IN" if form == "native" else "text_input", "BYTES", [1], string(given)))
    if own:
        fields["parameters"] = {"timeout": {"int64_param": own}}
    server.at_rest()
    with stopped(engine_pid(server)), grpc.insecure_channel(address(server)) as channel:
        with pytest.raises(grpc.RpcError) as late:
            call(channel, "ModelInfer", timeout=LIMIT_S + ALLOWED_S, **fields)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert ("its own time limit" if own else "this server's time limit") in late.value.details()
    all_ended(server)


def test_requests_of_a_killed_engine_are_counted_to_their_end():
    with Live("--max-num-seqs", "4") as server, ThreadPoolExecutor(6) as pool:
        held = [pool.submit(ask, server, "/v1/completions", {**LONG, "stream": i % 2 == 0}) for i in range(6)]
        running(server, 4)
        pids = children(server.process.pid)
        os.kill(engine_pid(server), signal.SIGKILL)
        for future in held:
            status, text, _ = future.result()
            assert status in (200, 500, 503) and '"error"' in text
        assert server.process.wait(60) == 1
        wait_gone(pids)
        told = server.event("ended")
        assert told["requests_accepted"] == told["requests_ended"] == 6


@pytest.mark.parametrize("share", [1.0, 1.001, 1.02])
def test_an_engine_without_memory_ends_every_request(share):
    """It fails the requests, or it dies and the server ends; either way each request is answered."""
    with Live("--max-num-seqs", "4") as server, ThreadPoolExecutor(4) as pool:
        pids, engine = children(server.process.pid), engine_pid(server)
        used = int(Path(f"/proc/{engine}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.prlimit(engine, resource.RLIMIT_AS, (int(share * used), resource.RLIM_INFINITY))
        body = {"prompt": [5] * 1500, "max_tokens": 60, "n": 4, "regex": "(a|b){60}", "timeout": 4 * LIMIT_S}
        for future in [pool.submit(ask, server, "/v1/completions", body) for _ in range(4)]:
            status, text, took = future.result()
            assert status in (200, 400, 408, 500, 503) and took < 4 * LIMIT_S + ALLOWED_S, text
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) in (0, 1)
        wait_gone(pids)
        told = server.event("ended")
        assert told["requests_accepted"] == told["requests_ended"]


def test_a_server_without_descriptors_answers_on_open_connections():
    with Live("--max-num-seqs", "4") as server, server.client() as client:
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, hard))
        for body in (SHORT, {**SHORT, "stream": True}, {**SHORT, "n": 2}, {**SHORT, "regex": "a|b"}):
            assert client.post("/v1/completions", json=body).status_code == 200
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        all_ended(server)
        assert server.stop() == 0


def test_a_server_that_had_no_descriptors_accepts_connections_again():
    """The system queues what it cannot accept; asyncio tries again after a second."""
    with Live("--max-num-seqs", "4") as server, server.client() as client, contextlib.ExitStack() as stack:
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, hard))
        for _ in range(100):
            stack.enter_context(server.connect())
        server.event("error in the event loop")
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert healthy_within(server, 20.0)
        all_ended(server)
        assert server.stop() == 0


def test_what_is_cached_needs_no_disk(short_folder):
    """Cached prefixes are in memory; no process that serves needs a file, so that a full disk stops none."""
    body = {"prompt": "import os\n" * 60, "max_tokens": 4}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "response_format": {"type": "json_object"}}
    with Live("--max-num-seqs", "4", environment={"TMPDIR": str(short_folder)}) as server:
        pids = [server.process.pid, *children(server.process.pid)]
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        for _ in range(5):
            for path, sent in (("/v1/completions", body), ("/v1/chat/completions", chat)):
                status, text, _ = ask(server, path, sent)
                assert status == 200, text
        assert server.metrics()["inferplane:prefix_cache_hits_total"] > 0
        assert engine_pid(server) in pids, "the engine goes on"
        assert not [path for path in short_folder.rglob("*") if path.is_file()], "there are no files, whole or in part"
        all_ended(server)
        assert server.stop() == 0


@pytest.mark.parametrize("size", [0, 1000, 4096])
def test_a_log_file_that_cannot_grow_stops_no_request(tmp_path, size):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "inferplane", "serve", "--device", "cpu", "--log-format", "json"]
    with (
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            wait_ready(client, process)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))
            for _ in range(50):
                answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
                assert answer.status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


MOVED = """
import itertools, time
now, steps = time.time, itertools.cycle(({steps}))
time.time = lambda: now() + next(steps)
"""


@pytest.mark.parametrize("steps", ["-1e6,", "0, 1e7, -1e7", "3600, -3600", "1e9,"])
def test_a_clock_that_is_moved_changes_no_limit(tmp_path, steps):
    (tmp_path / "sitecustomize.py").write_text(MOVED.replace("{steps}", steps))
    with Live("--max-num-seqs", "4", "--drain-s", "1", environment={"PYTHONPATH": str(tmp_path)}) as server:
        assert ask(server, "/v1/completions", {**SHORT, "timeout": 60})[0] == 200
        assert ask(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})[0] == 200
        with stopped(engine_pid(server)):
            status, text, took = ask(server, "/v1/completions", {**LONG, "timeout": LIMIT_S})
        assert (status, LIMIT_S <= took < LIMIT_S + ALLOWED_S) == (408, True), text
        all_ended(server)
        assert server.stop() == 0
