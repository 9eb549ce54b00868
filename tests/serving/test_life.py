"""A server from its start to its end: ports, loading, signals, clients that leave, engines that die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from inferplane.serving.lifecycle.run import ECHO_S
from tests.serving.live import Live, engine_pids

LONG = {"prompt": "x = [", "max_tokens": 1200, "temperature": 0, "ignore_eos": True}


def stream(server: Live, seconds: float = 90, **more) -> tuple[int, list[str]]:
    """A stream read to its end: its status and its events."""
    body = {**LONG, "stream": True, **more}
    with (
        httpx.Client(base_url=server.url, timeout=seconds) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        if answer.status_code != 200:
            answer.read()
            return answer.status_code, [answer.text]
        return 200, [line.removeprefix("data: ") for line in answer.iter_lines() if line]


def running(server: Live, count: int) -> None:
    limit = time.monotonic() + 60
    while server.metrics()["inferplane:num_requests_running"] < count:
        assert time.monotonic() < limit
        time.sleep(0.05)


def wait_gone(pids: list[int]) -> None:
    limit = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < limit, "processes were left behind"
        time.sleep(0.05)


# ---------------------------------------------------------------- the beginning


SLOW = """
import os, time
from inferplane.plugin import API_VERSION, hookimpl

INFERPLANE_API = API_VERSION

@hookimpl
def inferplane_on_event(event):
    if event.name == "plan.bound":
        from inferplane.engine.runner.model_runner import Runner
        allocate = Runner._allocate  # after the weights were read: before that nothing is answered
        def late(self, *args):
            while not os.path.exists(os.environ["GO_ON"]):
                time.sleep(0.01)
            return allocate(self, *args)
        Runner._allocate = late
"""


def slow_to_load(folder: Path) -> dict[str, str]:
    """Variables of a server whose engine loads until there is a file "go" in a folder."""
    (folder / "slow_to_load.py").write_text(SLOW)
    return {"INFERPLANE_PLUGINS": "slow_to_load", "PYTHONPATH": str(folder), "GO_ON": str(folder / "go")}


def test_loading_and_a_signal_meanwhile(tmp_path):
    plugin = slow_to_load(tmp_path)
    with Live(wait=False, environment=plugin) as server:
        with server.client() as client:
            assert client.get("/v2/health/live").status_code == 200
            assert client.get("/v2/health/ready").status_code == 503
            answer = client.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "2"
            assert answer.json()["error"]["code"] == "loading"
            assert client.get("/metrics").status_code == 200
            (tmp_path / "go").touch()
            server.event("ready")
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert server.stop() == 0
        assert "slow_to_load" not in server.text, "the plugin was not run"
    with Live(wait=False, environment={**plugin, "GO_ON": str(tmp_path / "never")}) as server:
        assert server.stop() == 0


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("drain_s", [60, 0])
def test_sigterm_drains_then_aborts_each_stream_with_a_last_word(drain_s):
    tokens = 600 if drain_s else 1200  # so many that all run at a time on a busy machine, too
    with Live("--max-num-seqs", "6", "--drain-s", str(drain_s)) as server, ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream, server, max_tokens=tokens) for _ in range(6)]
        running(server, 6)
        pids = engine_pids(server)
        assert pids
        server.process.send_signal(signal.SIGTERM)
        server.event("draining")
        if drain_s:
            with server.client() as client:
                assert client.get("/v2/health/live").status_code == 200
                assert client.get("/v2/health/ready").status_code == 503
                answer = client.post("/v1/completions", json={"prompt": "x"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
                assert int(answer.headers["retry-after"]) > 0
        for future in streams:
            status, events = future.result()
            assert status == 200
            if drain_s:
                assert events[-1] == "[DONE]"
                assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
            else:
                assert json.loads(events[-1])["error"]["code"] == "aborted"
                assert "[DONE]" not in events
        assert server.process.wait(60) == 0
        wait_gone(pids)
        with socket.create_server((server.host, server.port)):  # the port is free again
            pass


def test_a_second_signal_ends_it_at_once():
    with Live("--drain-s", "600") as server:

        def broken_off() -> None:
            with contextlib.suppress(httpx.HTTPError):
                stream(server)

        thread = threading.Thread(target=broken_off)
        thread.start()
        running(server, 1)
        pids = engine_pids(server)
        server.process.send_signal(signal.SIGTERM)
        server.event("draining")
        server.process.send_signal(signal.SIGTERM)  # a launcher's, to the whole group: the same one
        time.sleep(2 * ECHO_S)
        assert server.process.poll() is None
        begun = time.monotonic()
        assert server.stop() == 128 + signal.SIGTERM
        assert time.monotonic() - begun < 10
        thread.join(30)
        wait_gone(pids)


def test_a_signal_while_it_loads_leaves_no_folder(tmp_path, short_folder):
    """The engine's process removes its socket's folder when the process that made it has ended."""
    with Live(environment={"TMPDIR": str(short_folder), **slow_to_load(tmp_path)}, wait=False) as server:
        until(lambda: any(short_folder.glob("inferplane-*")))
        server.stop()
        assert not any(event["event"] == "ready" for event in server.log)
        assert "slow_to_load" not in server.text, "the plugin was not run"
        told = [event["event"] for event in server.log]
        assert told.index("listening") < told.index("draining") < told.index("ended")
    until(lambda: not any(short_folder.iterdir()))


def until(so: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not so():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_an_engine_that_is_killed_fails_its_requests_and_ends_the_server():
    with Live("--max-num-seqs", "4") as server, ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, server) for _ in range(3)]
        running(server, 3)
        for pid in engine_pids(server):
            os.kill(pid, signal.SIGKILL)
        for future in streams:
            status, events = future.result()
            assert status == 200
            assert json.loads(events[-1])["error"]["type"] in ("server_error", "unavailable_error")
        assert server.process.wait(60) == 1
        told = [e for e in server.log if e["event"] in ("engine died", "ended")]
        assert [e["event"] for e in told] == ["engine died", "ended"]
        assert "SIGKILL" in told[0]["why"] and "SIGKILL" not in told[1]["why"]  # once
        assert "AsyncLLM" not in server.text  # which is no remedy for an operator


def test_an_engine_that_is_stopped_is_not_ready_until_it_goes_on():
    with Live("--stall-s", "1") as server, ThreadPoolExecutor(1) as pool:
        future = pool.submit(stream, server, max_tokens=300)
        running(server, 1)
        pids = engine_pids(server)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            with server.client() as client:
                limit = time.monotonic() + 30
                while client.get("/v2/health/ready").status_code == 200:
                    assert time.monotonic() < limit
                    time.sleep(0.05)
                assert client.get("/health").json()["status"] == "stalled"
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert future.result()[1][-1] == "[DONE]"
        with server.client() as client:
            limit = time.monotonic() + 30
            while client.get("/v2/health/ready").status_code != 200:
                assert time.monotonic() < limit
                time.sleep(0.05)


# ---------------------------------------------------------------- clients that leave


@pytest.fixture(scope="module")
def small():
    with Live("--max-num-seqs", "2", "--max-waiting", "4") as server:
        yield server
        server.at_rest()
        assert server.stop() == 0


def leave(server: Live, body: dict, pieces: int, *before: dict) -> None:
    """Send requests in one write, read a number of pieces of the last, and close the connection."""
    asked = b""
    for data in (json.dumps(b).encode() for b in (*before, body)):
        asked += b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        asked += b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
    with server.connect() as sock:
        sock.sendall(asked)
        got = b""
        while got.count(b"\ndata: ") < pieces:
            got += sock.recv(65536)
            assert b" 200 " in got


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("point", ["accepted", "prompt", "first", "fifth", "whole", "large", "queued"])
def test_leaving_frees_everything(small, point, n):
    before = small.at_rest()
    body = {**LONG, "stream": point in ("first", "fifth"), "n": n}
    hogs = []
    if point == "prompt":
        body["prompt"] = "x = 1\n" * 250
    if point == "large":
        body["padding"] = "x" * 400_000
    if point == "queued":
        with ThreadPoolExecutor(2) as pool:
            hogs = [pool.submit(stream, small, max_tokens=150) for _ in range(2)]
            running(small, 2)
            leave(small, body, 0)
            assert all(h.result()[1][-1] == "[DONE]" for h in hogs)
    else:
        leave(small, body, {"first": 1, "fifth": 5}.get(point, 0))
        if point in ("whole", "large"):
            time.sleep(0.3)
    after = small.at_rest()
    name = 'inferplane:requests_aborted_total{cause="disconnect"}'
    generated = "inferplane:generation_tokens_total"
    assert after.get(name, 0) - before.get(name, 0) in (0, n)  # one that left before it was admitted counts nowhere
    if point in ("first", "fifth"):
        assert after[name] - before.get(name, 0) == n
    assert after.get(generated, 0) - before.get(generated, 0) < 1200


@pytest.mark.parametrize("short", [False, True], ids=["whole", "streamed"])
def test_leaving_during_a_connection_s_second_request_frees_everything(small, short):
    before = small.at_rest()
    first = {**LONG, "max_tokens": 2, "stream": short}
    leave(small, {**LONG, "stream": True}, 3 + 5 * short, first)  # a short stream has five events at most
    after = small.at_rest()
    name = 'inferplane:requests_aborted_total{cause="disconnect"}'
    assert after[name] - before.get(name, 0) == 1
    generated = "inferplane:generation_tokens_total"
    assert after[generated] - before.get(generated, 0) < 1200


def test_a_full_queue_is_a_429_at_once_and_no_request_is_lost(small):
    def one(i: int) -> tuple[int, float, str]:
        begun = time.monotonic()
        status, events = stream(small, max_tokens=40)
        if status == 429:
            return status, time.monotonic() - begun, json.loads(events[0])["error"]["code"]
        return status, 0.0, events[-1]

    with ThreadPoolExecutor(24) as pool:
        ends = list(pool.map(one, range(24)))
    served = [e for e in ends if e[0] == 200]
    refused = [e for e in ends if e[0] == 429]
    assert len(served) + len(refused) == 24
    assert len(served) >= 6 and refused
    assert {e[2] for e in served} == {"[DONE]"} and {e[2] for e in refused} == {"queue_full"}
    with small.client() as client:
        asked = [client.post("/v1/completions", json={**LONG, "max_tokens": 1, "n": 6}) for _ in range(2)]
    assert [a.status_code for a in asked] == [200, 200]


def test_a_request_that_takes_too_long_gets_an_error(small):
    with small.client() as client:
        body = {"text": "x = [", "max_dec_len": 1500, "timeout": 1, "min_dec_len": 1500}
        whole = client.post("/v1/completions", json=body)
        assert (whole.status_code, whole.json()["error_code"]) == (408, 408)
        *_, last = client.post("/v1/completions", json={**body, "stream": True}).text.splitlines()
        assert json.loads(last)["error_code"] == 408


def test_disable_streaming_sends_one_piece():
    with Live(environment={"DISABLE_STREAMING": "1"}) as server:
        _, events = stream(server, max_tokens=8, return_token_ids=True)
        first, done = events
        assert done == "[DONE]"
        assert len(json.loads(first)["choices"][0]["token_ids"]) == 8


def test_an_unread_log_delays_no_request():
    command = [sys.executable, "-m", "inferplane", "serve", "--device", "cpu", "--port", "0", "--log-format", "json"]
    command += ["--log-level", "debug"]  # which tells of probes
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            port = int(json.loads(process.stderr.readline())["http"].rpartition(":")[2])
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                for _ in range(600):  # of 250 bytes at least: a pipe holds 64 KiB
                    assert client.get("/v2/health/live", headers={"x-request-id": "x" * 100}).status_code == 200
        finally:
            process.kill()
