"""Keys have names, shares and an end: no client takes all of a server, and a key that leaked stops working at once.

Kind of advisory: one authenticated client exhausts what all share; credentials that only a restart revokes.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from inferplane.errors import UsageError
from inferplane.serving.errors import ApiError
from inferplane.serving.keys import MAX_KEYS, Keys
from inferplane.serving.shared_state import key_usage
from inferplane.serving.shared_state.key_usage import TOTAL_CELLS, KeyUsage, Shares, sequence_cells
from inferplane.serving.shared_state.shared_counters import SharedCounters
from inferplane.serving.shared_state.slots import SequenceSlots, SlotReservation
from tests.serving.live import Live
from tests.serving.test_grpc import address, call, raw, string
from tests.serving.test_workers import all_ready

LONG = {"text": "x = [", "max_dec_len": 1500, "min_dec_len": 1500, "stream": True}
SHORT = {"model": "default", "prompt": "x", "max_tokens": 2}


def ask(live: Live, secret: str, **more: Any) -> httpx.Response:
    """A request over a connection of its own."""
    with httpx.Client(base_url=live.url, timeout=60, headers={"authorization": f"Bearer {secret}"}) as client:
        return client.post("/v1/completions", json={**SHORT, **more})


def bearer(secret: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + secret.encode())]


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (["one"], ["key-1"]),
        (["one", "ci: two", "three"], ["key-1", "ci", "key-3"]),
        (["a.b-c_d:  two words"], ["a.b-c_d"]),
        (["colon:inside", "sk-x:y"], ["key-1", "key-2"]),
        (["not a name: x"], ["key-1"]),
    ],
)
def test_each_key_has_a_name(lines: list[str], names: list[str]) -> None:
    keys = Keys(lines)
    assert [key.name for key in keys.all] == names
    for line, key in zip(lines, keys.all):
        secret = line if key.name.startswith("key-") else line.partition(":")[2].strip()
        assert keys.find(bearer(secret)) is key
    other = Keys()
    other.set(keys.to_list())
    assert other.all == keys.all


def test_two_keys_of_one_name_are_refused() -> None:
    keys = Keys(["ci: one"])
    for lines in (["ci: one", "ci: two"], ["key-2: one", "two"], ["x: 1", "x: 1"]):
        with pytest.raises(UsageError, match="Two keys are named"):
            keys.replace(lines)
    with pytest.raises(UsageError, match="1025 keys"):
        keys.replace(f"name-{i}: {i}" for i in range(MAX_KEYS))  # and "ci", whose numbers stay
    assert keys.find(bearer("one")) is not None, "a list that is refused changes nothing"


def test_a_name_keeps_its_numbers() -> None:
    keys = Keys(["a: 1", "b: 2", "c: 3"])
    rows = {key.name: key.row for key in keys.all}
    keys.replace(["c: 3", "d: 4"])
    assert [key.row for key in keys.all] == [rows["c"], 3]
    keys.replace(["b: new", "d: 4", "a: 1"])
    assert [key.row for key in keys.all] == [rows["b"], 3, rows["a"]]
    assert keys.find(bearer("2")) is None and keys.find(bearer("new")) is keys.all[0]


def test_no_process_that_it_starts_has_a_key_in_its_environment() -> None:
    """Engine, worker and the helpers for templates and constraints: each can be read by /proc, dumps and logs."""
    with Live("--http-workers", "2", environment={"INFERPLANE_API_KEY": "s3cret"}) as live:
        all_ready(live, 2)
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 2,
            "response_format": {"type": "json_object"},
        }
        headers = {"authorization": "Bearer s3cret"}
        with httpx.Client(base_url=live.url, timeout=60, headers=headers) as client:
            assert (
                client.post("/v1/chat/completions", json={"model": "default", "max_tokens": 2, **body}).status_code
                == 200
            )
        found = descendants(live.process.pid)
        assert len(found) >= 4
        for pid in found:
            assert b"s3cret" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert live.stop() == 0


def descendants(pid: int) -> list[int]:
    children = [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]
    return [*children, *(p for child in children for p in descendants(child))]


# ---------------------------------------------------------------- shares


def test_a_key_cannot_take_all_places_of_all_processes() -> None:
    keys, shares = Keys(["a: 1", "b: 2"]), Shares(max_sequences=3)
    a, b = keys.all
    table = SharedCounters(2, TOTAL_CELLS)
    here = SequenceSlots(4, table, 0, KeyUsage(keys, shares, table, 0))
    there = SequenceSlots(4, SharedCounters(2, TOTAL_CELLS, table.fd), 1, KeyUsage(keys, shares, table, 1))
    first = SlotReservation(here, a)
    there.acquire(2, a)
    for slots in (here, there, here):
        with pytest.raises(ApiError, match="3 sequences of this key are being served or wait, of at most 3") as refused:
            slots.acquire(1, a)
        assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (429, "key_queue_full", 1)
    assert here.in_use == 3, "a refusal takes nothing"
    here.acquire(1, b)
    with pytest.raises(ApiError) as refused:
        here.acquire(1, b)
    assert refused.value.code == "queue_full"
    first.release()
    here.acquire(1, a)
    for cell in sequence_cells():  # what is done for a worker that was killed
        table.write(1, cell, 0)
    assert dict(here.usage.items()) == {"a": [1, 0, 0], "b": [1, 0, 0]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(key_usage.time, "monotonic", lambda: now[0])
    return now


def test_tokens_of_a_minute(clock: list[float]) -> None:
    """A share is for the last minute, not for a minute that begins somewhere."""
    keys = Keys(["a: 1", "b: 2"])
    usage = KeyUsage(keys, Shares(tokens_per_minute=100))
    a, b = keys.all

    def refused() -> int | None:
        try:
            usage.acquire(a, 1)
        except ApiError as error:
            return error.retry_after_s if (error.status, error.code) == (429, "key_tokens_used_up") else -1
        return None

    assert refused() is None
    for _ in range(5):
        clock[0] += 10
        usage.add_request(a, 19)
    assert refused() is None  # 95
    clock[0] += 5
    usage.add_request(a, 10)
    assert refused() in range(1, 61)  # 105 in 55 seconds
    usage.acquire(b, 1)
    clock[0] += refused() or 0
    assert refused() is None, "the wait that it is told is enough"
    clock[0] += 500
    assert refused() is None
    usage.add_request(a, 1000)
    assert refused() in (59, 60, 61)
    clock[0] += 61
    assert refused() is None


def test_shares_over_http_and_grpc(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("greedy: one\nother: two\n")
    options = ("--max-num-seqs", "4", "--max-num-seqs-per-key", "2", "--grpc-port", "0", "--api-key-file", str(path))
    with Live(*options) as live:
        client = httpx.Client(base_url=live.url, timeout=60, headers={"authorization": "Bearer one"})
        with client, client.stream("POST", "/v1/completions", json=LONG) as first:
            lines = first.iter_lines()  # kept: its end would close the connection
            next(lines)
            found = ask(live, "one", n=2)
            assert found.status_code == 429, found.text
            assert found.headers["retry-after"] == "1"
            with grpc.insecure_channel(address(live)) as channel:
                fields = raw(("text_input", "BYTES", [1], string(b"x")), ("max_tokens", "INT32", [1], b"\2\0\0\0"))
                call(channel, "ModelInfer", metadata=[("authorization", "Bearer one")], **fields)
                with client.stream("POST", "/v1/completions", json=LONG) as second:
                    more = second.iter_lines()
                    next(more)
                    with pytest.raises(grpc.RpcError) as refused:
                        call(channel, "ModelInfer", metadata=[("authorization", "Bearer one")], **fields)
                    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                    assert ask(live, "one").status_code == 429
                    assert ask(live, "two", n=2).status_code == 200
        with httpx.Client(base_url=live.url, headers={"authorization": "Bearer two"}, timeout=60) as reader:
            limit = time.monotonic() + 30
            while 'key_admitted_sequences{key="greedy"} 0.0' not in (text := reader.get("/metrics").text):
                assert time.monotonic() < limit, text
        assert 'inferplane:key_requests_total{key="other"} 1.0' in text
        assert 'inferplane:key_requests_total{key="greedy"} 3.0' in text
        assert 'inferplane:requests_rejected_total{reason="key_queue_full"} 3.0' in text
        assert live.event("request", status=429)["key"] == "greedy"
        assert live.stop() == 0
    assert "Bearer" not in live.text


def test_tokens_of_a_minute_over_http() -> None:
    with Live("--api-key", "one", "--api-key", "two", "--max-tokens-per-minute-per-key", "40") as live:
        assert ask(live, "one", max_tokens=60, ignore_eos=True).status_code == 200
        found = ask(live, "one")
        assert (found.status_code, found.json()["error"]["code"]) == (429, "key_tokens_used_up")
        assert 1 <= int(found.headers["retry-after"]) <= 61
        assert ask(live, "two").status_code == 200
        assert live.stop() == 0


# ---------------------------------------------------------------- the end of a key


@pytest.mark.parametrize("processes", [1, 2])
def test_the_key_file_is_read_again(tmp_path: Path, processes: int) -> None:
    """On SIGHUP, by every process and every protocol; what runs goes on, and a broken file changes nothing."""
    path = tmp_path / "keys"
    path.write_text("# keys of this team\nci: one\nother: two\n")
    options = ("--api-key-file", str(path), "--http-workers", str(processes), "--grpc-port", "0")
    with Live(*options) as live:
        all_ready(live, processes)

        def statuses(secret: str) -> set[int]:
            return {ask(live, secret).status_code for _ in range(12)}

        def read_again(text: str | None, event: str) -> dict[str, Any]:
            path.unlink() if text is None else path.write_text(text)
            seen = len(live.log)
            live.process.send_signal(signal.SIGHUP)
            return live.event(event, after=seen)

        def settle(secret: str, status: int) -> None:
            """The other process reads its new keys a moment later."""
            limit = time.monotonic() + 30
            while statuses(secret) != {status}:
                assert time.monotonic() < limit

        assert (statuses("one"), statuses("three")) == ({200}, {401})
        client = httpx.Client(base_url=live.url, timeout=60, headers={"authorization": "Bearer one"})
        with client, client.stream("POST", "/v1/completions", json=LONG) as running:
            lines = running.iter_lines()
            next(lines)
            assert read_again("other: two\nnew: three\n", "keys read again")["keys"] == 2
            settle("one", 401)
            settle("three", 200)
            assert statuses("two") == {200}
            with grpc.insecure_channel(address(live)) as channel, pytest.raises(grpc.RpcError) as refused:
                call(channel, "ServerMetadata", metadata=[("authorization", "Bearer one")])
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert sum(1 for _ in lines) > 10, "a request that runs goes on"
        for text, why in (("", "holds no key"), ("a: 1\na: 2\n", "Two keys"), (None, "cannot be read")):
            assert why in read_again(text, "the keys stay as they are")["why"]
            assert (statuses("two"), statuses("one")) == ({200}, {401})
        assert live.stop() == 0
