"""What gRPC's messages take is counted before they are parsed, and gRPC's health is answered while the loop is stuck.

The class of advisories: denial of service by messages whose objects are many times larger than their bytes, and by
probes that fail because a server is busy.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inferplane.serving.errors import ApiError
from inferplane.serving.grpc import schema
from inferplane.serving.grpc.messages import MAX_FIELDS, MAX_NUMBER_BYTES, count_memory, parse_message
from tests.serving.live import Live
from tests.serving.test_grpc import address, call, raw, string
from tests.serving.test_health import STUCK, until

INFER = schema.message("ModelInferRequest")
SIZE = 2**20
Code = grpc.StatusCode


def varint(number: int) -> bytes:
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])


def field(number: int, data: bytes) -> bytes:
    """A field of bytes, as it is sent."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def filled(unit: bytes, size: int = SIZE) -> bytes:
    return unit * (size // len(unit))


def parameters(number: int, size: int = SIZE) -> bytes:
    """As many parameters as fit, each with a name of its own."""
    return b"".join(field(number, field(1, b"%x" % i)) for i in range(size // 9))


INPUT, OUTPUT, RAW, SHAPE, CONTENTS = 5, 6, 7, 3, 5
BOMBS: dict[str, bytes] = {
    "empty inputs": filled(field(INPUT, b"")),
    "empty outputs": filled(field(OUTPUT, b"")),
    "empty raw contents": filled(field(RAW, b"")),
    "parameters": parameters(4),
    "parameters of an input": field(INPUT, parameters(4)),
    "parameters of an output": field(OUTPUT, parameters(2)),
    "a shape": field(INPUT, field(SHAPE, b"\1" * (SIZE + 1))),
    "a shape, not packed": field(INPUT, filled(b"\x18\1")),
    "numbers": field(INPUT, field(CONTENTS, field(3, b"\1" * (SIZE + 1)))),
    "numbers of two inputs": 2 * field(INPUT, field(CONTENTS, field(1, b"\1" * (SIZE // 2 + 1)))),
    "empty texts": field(INPUT, field(CONTENTS, filled(field(8, b"")))),
    "unknown numbers": filled(b"\x98\x06\1"),
    "unknown groups": filled(b"\x9b\x06\x9c\x06"),
    "names": filled(field(1, b"")),
    "fixed numbers": filled(b"\x99\x06" + bytes(8)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_a_message_would_be_made_of_is_counted_before(name: str) -> None:
    with pytest.raises(ApiError, match=f"more than ({MAX_FIELDS} fields|{MAX_NUMBER_BYTES} bytes)") as refused:
        count_memory(INFER, BOMBS[name])
    assert (refused.value.status, refused.value.code) == (400, "too_many")


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


FULL: dict[str, bytes] = {
    "empty inputs": field(INPUT, b"") * MAX_FIELDS,
    "inputs with contents": field(INPUT, field(CONTENTS, b"")) * (MAX_FIELDS // 2),
    "parameters": parameters(4, 9 * MAX_FIELDS // 2),
    "a shape": field(INPUT, field(SHAPE, b"\1" * (MAX_NUMBER_BYTES - 1))),
    "numbers": field(INPUT, field(CONTENTS, field(3, b"\1" * (MAX_NUMBER_BYTES - 1)))),
    "one text": field(RAW, b"x" * 4 * SIZE),
    "a long parameter": field(4, field(1, b"a") + field(2, field(3, b"x" * 4 * SIZE))),
}


@pytest.mark.parametrize("name", FULL)
def test_a_message_takes_at_most_what_it_is_charged(name: str) -> None:
    copies = 16
    charged = copies * count_memory(INFER, FULL[name])
    gc.collect()
    before = memory()
    kept = [parse_message(INFER, FULL[name]) for _ in range(copies)]
    assert len(kept) == copies and memory() - before <= charged + 8 * 2**20


def changes(data: bytes) -> Iterator[bytes]:
    """A message cut off at each place, and with each byte changed in two ways."""
    for at in range(len(data)):
        yield data[:at]
        for byte in (data[at] ^ 1, 0xFF):
            yield data[:at] + bytes([byte]) + data[at + 1 :]


def test_the_walk_accepts_what_the_parser_accepts() -> None:
    tokens = ("max_tokens", "INT32", [1], struct.pack("<i", 2))
    request = INFER(**raw(("text_input", "BYTES", [1], string(b"some text")), tokens))
    request.parameters["temperature"].double_param = 0.5
    seen = set()
    for data in changes(request.SerializeToString()):
        accepted = walked = True
        try:
            parse_message(INFER, data)
        except ApiError:
            accepted = False
        try:
            count_memory(INFER, data)
        except ApiError:
            walked = False
        assert walked or not accepted, data
        seen.add((walked, accepted))
    assert {(True, True), (False, False)} <= seen


# -- a server


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    with Live("--max-held-bytes", "16MiB", "--grpc-port", "0", "--max-num-seqs", "8") as live:
        yield live
        live.at_rest()
        assert live.stop() == 0


def rss(live: Live) -> int:
    return int(Path(f"/proc/{live.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def infer(channel: grpc.Channel, data: bytes) -> Any:
    return channel.unary_unary(f"/{schema.SERVICE}/ModelInfer")(data, timeout=60)


@pytest.mark.parametrize("name", BOMBS)
def test_a_message_of_too_many_fields_is_refused(small: Live, name: str) -> None:
    before = rss(small)
    with grpc.insecure_channel(address(small)) as channel, pytest.raises(grpc.RpcError) as refused:
        infer(channel, BOMBS[name])
    assert refused.value.code() == Code.INVALID_ARGUMENT and "more than" in refused.value.details()
    assert rss(small) - before < 64 * 2**20


LISTS = json.dumps({"text": "x", "stop": [[] for _ in range(30_000)]}).encode()
"""A valid beginning whose values would take megabytes: it is refused for its content if there is memory for it."""
BUSY = 'inferplane:requests_rejected_total{reason="busy"}'


@pytest.mark.parametrize(
    "fields",
    [
        raw(("text_input", "BYTES", [1], string(b"x" * 4_100_000))),
        raw(("IN", "BYTES", [1], string(LISTS.ljust(3_000_000)))),
    ],
    ids=["typed", "native"],
)
def test_messages_and_their_values_are_held_against_the_budget(small: Live, fields: dict[str, Any]) -> None:
    """24 at once would hold several times what there is; some are served, others are refused, and all is given back."""
    data = INFER(**fields).SerializeToString()

    def status(_: int) -> tuple[Any, str]:
        with grpc.insecure_channel(address(small)) as channel, pytest.raises(grpc.RpcError) as refused:
            infer(channel, data)
        return refused.value.code(), refused.value.details()

    before = small.metrics().get(BUSY, 0.0)
    with ThreadPoolExecutor(24) as senders:
        answers = list(senders.map(status, range(24)))
    busy = [text for code, text in answers if code == Code.RESOURCE_EXHAUSTED]
    assert all("Too many large bodies at a time" in text for text in busy)
    assert {code for code, _ in answers} <= {Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT}
    assert small.metrics().get(BUSY, 0.0) - before == len(busy)
    assert status(0)[0] == Code.INVALID_ARGUMENT, "what was held is free again"
    with grpc.insecure_channel(address(small)) as channel:
        short = raw(("text_input", "BYTES", [1], string(b"x")), ("max_tokens", "INT32", [1], struct.pack("<i", 2)))
        assert call(channel, "ModelInfer", **short).outputs


def test_a_message_beyond_the_budget_is_refused_and_its_stream_goes_on() -> None:
    """Bodies over HTTP and messages of gRPC share one budget, which is less than one large message here."""
    with Live("--max-held-bytes", "1MiB", "--grpc-port", "0") as live, grpc.insecure_channel(address(live)) as channel:
        large = INFER(**raw(("text_input", "BYTES", [1], string(b"x" * 900_000)), id="large")).SerializeToString()
        with pytest.raises(grpc.RpcError) as refused:
            infer(channel, large)
        assert refused.value.code() == Code.RESOURCE_EXHAUSTED
        assert dict(refused.value.trailing_metadata())["inferplane-code"] == "busy"
        tokens = ("max_tokens", "INT32", [1], struct.pack("<i", 2))
        short = INFER(**raw(("text_input", "BYTES", [1], string(b"x")), tokens, id="short")).SerializeToString()
        answered = schema.message("ModelStreamInferResponse")
        stream = channel.stream_stream(
            f"/{schema.SERVICE}/ModelStreamInfer", response_deserializer=answered.FromString
        )(iter([large, short]), timeout=60)
        found = list(stream)
        failed = [r for r in found if r.error_message]
        assert [r.infer_response.id for r in failed] == ["large"]
        assert failed[0].infer_response.parameters["code"].string_param == "busy"
        assert {r.infer_response.id for r in found if not r.error_message} == {"short"}
        with live.client() as client:
            assert client.post("/v1/completions", json={"prompt": "x" * 900_000}).status_code == 503
        assert live.stop() == 0


# -- health


def statuses(live: Live) -> dict[str, Any]:
    """What the port of gRPC's health says, over a connection of its own."""
    with grpc.insecure_channel(live.event("listening")["grpc_health"]) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        named, whole = 0, 1
        for _ in range(3):  # it may change between the two calls
            named = check(health_pb2.HealthCheckRequest(service=schema.SERVICE), timeout=30).status
            whole = check(health_pb2.HealthCheckRequest(), timeout=30).status
            if named == whole:
                break
        live_, ready = (call(channel, name, timeout=30) for name in ("ServerLive", "ServerReady"))
    assert named == whole
    return {"serving": whole == health_pb2.HealthCheckResponse.SERVING, "live": live_.live, "ready": ready.ready}


@pytest.mark.parametrize("args", [(), ("--api-key", "k", "--http-workers", "2")], ids=["alone", "key and workers"])
def test_health_is_answered_while_the_event_loop_is_stuck(tmp_path: Path, args: tuple[str, ...]) -> None:
    flag = tmp_path / "stuck"
    (tmp_path / "sitecustomize.py").write_text(STUCK.format(flag=str(flag)))
    more = ("--grpc-port", "0", "--grpc-health-port", "0", "--stall-s", "6", *args)
    with Live(*more, environment={"PYTHONPATH": str(tmp_path)}) as server:

        def seen() -> dict[str, Any]:
            return statuses(server)

        assert seen() == {"serving": True, "live": True, "ready": True}
        flag.touch()
        os.kill(server.process.pid, signal.SIGUSR1)
        try:
            until(seen, lambda found: found == {"serving": False, "live": True, "ready": False} or not found["live"])
            until(seen, lambda found: found == {"serving": False, "live": False, "ready": False})
            with grpc.insecure_channel(address(server)) as channel, pytest.raises(grpc.RpcError) as late:
                call(channel, "ServerLive", timeout=0.5)
            assert late.value.code() == Code.DEADLINE_EXCEEDED, "the loop is stuck, indeed"
        finally:
            flag.unlink()
        until(seen, lambda found: all(found.values()))
        assert server.stop() == 0


def refusals() -> dict[str, Callable[[grpc.Channel], Any]]:
    stub = health_pb2_grpc.HealthStub
    return {
        "NOT_FOUND": lambda c: stub(c).Check(health_pb2.HealthCheckRequest(service="other"), timeout=30),
        "UNIMPLEMENTED": lambda c: list(stub(c).Watch(health_pb2.HealthCheckRequest(), timeout=30)),
        "RESOURCE_EXHAUSTED": lambda c: stub(c).Check(health_pb2.HealthCheckRequest(service="x" * 10_000), timeout=30),
    }


def test_the_port_of_health_does_nothing_else() -> None:
    with (
        Live("--grpc-health-port", "0") as live,
        grpc.insecure_channel(live.event("listening")["grpc_health"]) as channel,
    ):
        for code, ask in refusals().items():
            with pytest.raises(grpc.RpcError) as refused:
                ask(channel)
            assert refused.value.code() == Code[code]
        with pytest.raises(grpc.RpcError) as refused:
            call(channel, "ModelInfer", **raw(("text_input", "BYTES", [1], string(b"x"))))
        assert refused.value.code() == Code.UNIMPLEMENTED
        assert live.stop() == 0
