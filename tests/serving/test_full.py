"""A full queue: every process refuses at once, in the dialect of the request."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from inferplane.serving.errors import ApiError
from inferplane.serving.shared_state.shared_counters import SharedCounters
from inferplane.serving.shared_state.slots import SLOTS_CELL, SequenceSlots, SlotReservation
from tests.serving.live import Live

LONG: dict[str, Any] = {"prompt": "x = [", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}
SHORT: dict[str, Any] = {"prompt": "x", "max_tokens": 1}
REJECTED = 'inferplane:requests_rejected_total{reason="queue_full"}'


def head(length: int, path: str = "/v1/completions") -> bytes:
    words = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
    return words.encode()


@contextlib.contextmanager
def filled(live: Live, streams: int):
    """Open a number of streams, and read the first piece of each."""
    with contextlib.ExitStack() as opened:
        socks = [opened.enter_context(live.connect()) for _ in range(streams)]
        data = json.dumps(LONG).encode()
        for sock in socks:
            sock.sendall(head(len(data)) + data)
        for sock in socks:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        yield


@pytest.fixture(scope="module")
def small():
    with Live("--max-num-seqs", "2", "--max-waiting", "0") as live:
        yield live
        live.at_rest()
        assert live.stop() == 0


def test_refusals_speak_the_dialect_and_are_counted(small):
    before = small.metrics().get(REJECTED, 0)
    with filled(small, 2), small.client() as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            refused = client.post(path, json={**SHORT, "messages": [{"role": "user", "content": '"text": 1'}]})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "queue_full"
            assert "connection" not in refused.headers  # it was read whole: the next request may follow
            native = client.post(path, json={"text": "x", "req_id": "a7"})
            assert (native.status_code, native.json()["error_code"], native.json()["req_id"]) == (429, 429, "a7")
        refused = client.post("/v1/embeddings", json={"input": "x", "text": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}).is_error
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200  # needs no slot
        assert small.metrics()[REJECTED] - before == 6
    small.at_rest()
    with small.client() as client:
        assert client.post("/v1/completions", json=SHORT).status_code == 200


def test_a_large_body_is_not_waited_for(small):
    with filled(small, 2), small.connect() as sock:
        sock.sendall(head(2**20) + b"{")
        said = b""
        while piece := sock.recv(4096):  # and the connection is closed: the rest is not read
            said += piece
        assert said.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in said
    small.at_rest()


def test_half_bodies_hold_no_place(small):
    with contextlib.ExitStack() as opened:
        for _ in range(8):
            opened.enter_context(small.connect()).sendall(head(40) + b'{"prompt": ')
        time.sleep(0.2)
        with small.client() as client:
            assert client.post("/v1/completions", json=SHORT).status_code == 200


def test_processes_share_the_slots():
    with Live("--max-num-seqs", "2", "--max-waiting", "2", "--http-workers", "3") as live:
        limit = time.monotonic() + 90
        while sum(e["event"] == "ready" for e in live.log) < 3:
            assert time.monotonic() < limit, live.text[-3000:]
            time.sleep(0.05)
        with filled(live, 2), contextlib.ExitStack() as waiting:
            data = json.dumps(LONG).encode()
            for _ in range(2):
                waiting.enter_context(live.connect()).sendall(head(len(data)) + data)
            while live.metrics()["inferplane:admitted_sequences"] < 4:
                assert time.monotonic() < limit
                time.sleep(0.02)
            for _ in range(30):
                with live.client() as client:  # a connection of its own, for whichever process is first
                    assert client.post("/v1/completions", json=SHORT).status_code == 429
        live.at_rest()
        assert live.stop() == 0


def test_slots_are_counted_over_all_processes_and_released():
    shared_counters = SharedCounters(2, 1)
    here, there = SequenceSlots(3, shared_counters), SequenceSlots(3, SharedCounters(2, 1, shared_counters.fd), 1)
    here.acquire(2)
    kept = SlotReservation(there)
    with pytest.raises(ApiError) as refused:
        SlotReservation(here)
    assert (refused.value.status, here.in_use, there.in_use) == (429, 3, 3)
    assert kept.transfer() == 1
    kept.release()  # another holds it now
    assert there.in_use == 3
    there.release(1)
    lost = SlotReservation(there)
    shared_counters.write(1, SLOTS_CELL, 0)  # what the first process does when the second ends
    assert here.in_use == 2
    lost.release()
    assert there.in_use == 2
