"""Promises of SECURITY.md about requests and the server: one test each, of the promise's name."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import pickle
import signal
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

import inferplane
from inferplane.serving.grpc import schema
from inferplane.serving.http.app import full_app
from inferplane.serving.http.gate import OPEN
from inferplane.serving.keys import Keys
from inferplane.serving.service import Service
from inferplane.serving.settings import ServerSettings
from tests.serving.live import Live
from tests.serving.test_access import request, spellings
from tests.serving.test_boundaries import LISTS, NUMBERS
from tests.serving.test_edge import FOREIGN
from tests.serving.test_grpc import BAD, address, call, raw, string
from tests.serving.test_grpc_limits import BOMBS, infer
from tests.serving.test_life import LONG
from tests.serving.test_lists import rss
from tests.serving.test_promises_files import Evil
from tests.serving.test_raw_socket import BODY, CASES, HOST, JSON, status, talk
from tests.serving.test_watchdog import engine_pid, stopped

Code = grpc.StatusCode
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SHORT = {"prompt": "x", "max_tokens": 2}
BUDGET_MIB, CONNECTIONS = 64, 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server has its temporary files."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    """A server without keys, on a loopback address."""
    options = ("--max-num-seqs", "8", "--max-held-bytes", f"{BUDGET_MIB}MiB", "--max-connections", str(CONNECTIONS))
    with Live(*options, "--grpc-port", "0", "--deterministic", environment={"TMPDIR": str(folder)}) as server:
        yield server
        server.at_rest()
        assert server.stop() == 0


KEYS = "first: s3cret-one\nsecond: s3cret-two\n"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS)
    return path


@pytest.fixture(scope="module")
def guarded(key_file: Path) -> Iterator[Live]:
    """A server with two keys."""
    with Live("--api-key-file", str(key_file), "--grpc-port", "0", "--max-num-seqs", "4") as server:
        yield server
        assert server.stop() == 0
        assert "s3cret" not in server.text


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def complete(server: Live, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> httpx.Response:
    """A request over a connection of its own."""
    with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
        return client.post(path, json=body)


def text_of(server: Live, prompt: str) -> str:
    return complete(server, {"prompt": prompt, "max_tokens": 24, "temperature": 0}).json()["choices"][0]["text"]


# -- requests are data


def test_requests_do_not_end_the_engine(live: Live) -> None:
    engine = engine_pid(live)
    found = set()
    for name, (_, bad) in {**NUMBERS, **LISTS}.items():
        found |= {complete(live, {**SHORT, name: value}).status_code for value in bad}
    for prompt in (
        [],
        [-1],
        [2**31],
        [[]],
        [[5], "x"],
        "",
        [5] * 5000,
        "x" * 10**6,
        ["x"] * 65,
        {"a": 1},
        None,
        "\x00",
    ):
        found.add(complete(live, {**SHORT, "prompt": prompt}).status_code)
    assert found <= {200, 400, 413} and 400 in found
    for case in CASES.values():
        assert status(talk(live, case, half_close=True)) in {0, *range(400, 506)}
    with grpc.insecure_channel(address(live)) as channel:
        for fields, _ in BAD.values():
            with pytest.raises(grpc.RpcError):
                call(channel, "ModelInfer", **fields)
    assert complete(live, SHORT).status_code == 200
    assert engine_pid(live) == engine


def test_requests_see_no_other_request(live: Live, guarded: Live) -> None:
    prompts = [f"def function_{i}(argument_{i}):\n    return " for i in range(8)]
    alone = [text_of(live, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            assert list(pool.map(lambda prompt: text_of(live, prompt), prompts)) == alone

    def hits(secret: str) -> float:
        body = {"prompt": "import os\n" * 40, "max_tokens": 1}
        assert complete(guarded, body, **bearer(secret)).status_code == 200
        with httpx.Client(base_url=guarded.url, timeout=60, headers=bearer(secret)) as client:
            lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("inferplane:prefix_cache_hits_total"))

    first = hits("s3cret-one")
    assert hits("s3cret-two") == first, "what one key has cached, another does not hit"
    assert hits("s3cret-one") > first, "but the same key does"


def test_requests_use_bounded_memory(live: Live) -> None:
    bodies = [b'{"prompt":[' + b",".join([unit] * (2**20 // (len(unit) + 1))) + b"]}" for unit in (b"[]", b"7", b'"a"')]
    before = rss(live)
    kind = {"content-type": "application/json"}
    with httpx.Client(base_url=live.url, timeout=120) as client, ThreadPoolExecutor(12) as pool:
        sent = [pool.submit(client.post, COMPLETIONS, content=body, headers=kind) for body in bodies * 8]
        assert {future.result().status_code for future in sent} <= {400, 503}
    with grpc.insecure_channel(address(live)) as channel:
        for bomb in BOMBS.values():
            with pytest.raises(grpc.RpcError) as refused:
                infer(channel, bomb)
            assert refused.value.code() == Code.INVALID_ARGUMENT
    assert rss(live, "VmHWM") - before < BUDGET_MIB + 64, "beside the budget: what connections hold"
    assert complete(live, SHORT).status_code == 200


def test_requests_are_not_run(live: Live, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"{{{{ 7 * 7 }}}}{{% include 'x' %}}{{{{ cycler.__init__.__globals__.os.mkdir('{mark}') }}}} $(mkdir {mark})"
    messages = [{"role": "user", "content": code}]
    tokens = complete(live, {"messages": messages}, "/tokenize").json()["tokens"]
    assert code in complete(live, {"tokens": tokens}, "/detokenize").json()["prompt"]
    for body in ({**SHORT, "prompt": code}, {**SHORT, "stop": code[:200]}, {"text": code, "max_dec_len": 2}):
        assert complete(live, body).status_code == 200
    for field in ("chat_template", "template"):
        answer = complete(live, {"messages": messages, "max_tokens": 2, field: code}, CHAT)
        assert answer.status_code == 400 or field in answer.headers["x-inferplane-ignored"]
    assert complete(live, {"messages": messages, "max_tokens": 2}, CHAT).status_code == 200
    assert not mark.exists()


def test_requests_open_nothing(live: Live, tmp_path: Path) -> None:
    """A listener that would see a fetch, and a pipe: whoever reads it is still there, because nothing is written."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        for place in (there, f"file://{pipe}", str(pipe)):
            part = [{"type": "image_url", "image_url": {"url": place}}]
            schema_of = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": place}}}
            tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": place}}}
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            complete(live, {**chat, "messages": [{"role": "user", "content": part}]}, CHAT)
            complete(live, {**chat, "response_format": schema_of}, CHAT)
            complete(live, {**chat, "tools": [tool], "tool_choice": "required"}, CHAT)
            complete(live, {**SHORT, "grammar": f'%import "{place}"\nstart: "x"'})
            for field in ("prompt", "model", "lora_path", "regex", "user"):
                complete(live, {**SHORT, field: place})
            complete(live, {"input": place}, "/v1/embeddings")
        listener.settimeout(0.5)
        with pytest.raises(TimeoutError):
            listener.accept()
    with pytest.raises(OSError) as closed:
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    assert closed.value.errno == errno.ENXIO
    assert complete(live, SHORT).status_code == 200


# -- the server


async def _paths() -> list[str]:
    return sorted({route.path.replace("{model:path}", "demo") for route in full_app(Service(ServerSettings())).routes})


def test_every_route_but_health_needs_a_key(guarded: Live) -> None:
    import asyncio

    for path in asyncio.run(_paths()):
        for spelled in spellings(path):
            for method, header in (("GET", b""), ("POST", b"Authorization: Bearer wrong\r\n")):
                found = status(talk(guarded, request(method, spelled, header)))
                is_open = spelled.split("?")[0].removeprefix("http://x") in OPEN
                assert found == (200 if method == "GET" else 405) if is_open else found in (401, 400, 0), spelled
    with grpc.insecure_channel(address(guarded)) as channel:
        for method in set(schema.METHODS) - {"ServerLive", "ServerReady", "ModelStreamInfer"}:
            with pytest.raises(grpc.RpcError) as refused:
                call(channel, method)
            assert refused.value.code() == Code.UNAUTHENTICATED
    assert complete(guarded, SHORT, **bearer("s3cret-one")).status_code == 200


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def record(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", record)
    keys = Keys(["one", "two", "three"])
    for secret in ("one", "two", "three", "", "on", "x" * 10_000):
        compared.clear()
        found = keys.find([(b"authorization", f"Bearer {secret}".encode())])
        assert (found is not None) == (secret in ("one", "two", "three"))
        assert compared == [(32, 32)] * 3, "every key, by digests of one length"


def test_removed_keys_are_refused(guarded: Live, key_file: Path) -> None:
    def read_again(text: str) -> None:
        key_file.write_text(text)
        seen = len(guarded.log)
        guarded.process.send_signal(signal.SIGHUP)
        guarded.event("keys read again", after=seen)

    assert complete(guarded, SHORT, **bearer("s3cret-two")).status_code == 200
    read_again(KEYS.splitlines()[0])
    try:
        assert complete(guarded, SHORT, **bearer("s3cret-two")).status_code == 401
        with grpc.insecure_channel(address(guarded)) as channel, pytest.raises(grpc.RpcError) as refused:
            call(channel, "ServerMetadata", metadata=[("authorization", "Bearer s3cret-two")])
        assert refused.value.code() == Code.UNAUTHENTICATED
        assert complete(guarded, SHORT, **bearer("s3cret-one")).status_code == 200
    finally:
        read_again(KEYS)
    assert complete(guarded, SHORT, **bearer("s3cret-two")).status_code == 200


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x" * 1000] * 70}}}
BEYOND: dict[str, tuple[int, dict[str, Any]]] = {
    "prompts": (64, {"prompt": ["x"] * 65}),
    "tokens": (2048, {"prompt": [5] * 3000}),
    "sequences": (64, {"n": 65}),
    "stop strings": (16, {"stop": ["x"] * 17}),
    "a stop string": (256, {"stop": "x" * 257}),
    "stop tokens": (1024, {"stop_token_ids": [7] * 1025}),
    "biases": (1024, {"logit_bias": {str(i): 0 for i in range(1025)}}),
    "a schema": (65536, {"response_format": {"type": "json_object", "schema": SCHEMA}}),
    "a regex": (4096, {"regex": "x" * 5000}),
    "a grammar": (65536, {"grammar": 'start: "' + "x" * 70_000 + '"'}),
}
"""What is refused: the limit, which the answer names, and a request beyond it."""


def test_limits_are_hard(live: Live) -> None:
    for name, (limit, body) in BEYOND.items():
        answer = complete(live, {**SHORT, **body})
        assert answer.status_code == 400 and str(limit) in answer.json()["error"]["message"], (name, answer.text)
    assert status(talk(live, CASES["a header of 100 KiB"])) in (400, 431)
    stated = b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: 4194305\r\n\r\n"
    assert status(talk(live, stated)) == 413, "a body is refused by its length"
    assert status(talk(live, CASES["chunks beyond the limit"])) == 413, "and one without a length while it is read"
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(live.connect())
        assert talk(live, b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n") == b"", "one connection too many is closed"


def test_time_limits_hold(live: Live) -> None:
    with stopped(engine_pid(live)):
        for more in ({}, {"stream": True}, {"n": 2}):
            answer = complete(live, {**LONG, **more, "timeout": 1})
            assert answer.status_code == 408, answer.text
    live.at_rest()


def test_no_connection_carries_pickle(live: Live, folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = pickle.dumps(Evil(mark))
    pickle.loads(evil)
    mark.rmdir()  # it works
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\nContent-Type: " % len(evil)
    for kind in (b"application/json", b"application/octet-stream", b"application/python-pickle"):
        assert status(talk(live, head + kind + b"\r\n\r\n" + evil)) in (400, 415)
    with grpc.insecure_channel(address(live)) as channel:
        for data in (
            evil,
            schema.message("ModelInferRequest")(**raw(("IN", "BYTES", [1], string(evil)))).SerializeToString(),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                infer(channel, data)
            assert refused.value.code() == Code.INVALID_ARGUMENT
    (engine,) = folder.glob("inferplane-*/engine")
    for data in (evil, struct.pack("<I", len(evil)) + evil, struct.pack(">I", len(evil)) + evil):
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
            sock.settimeout(2)
            sock.connect(str(engine))
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
    assert complete(live, SHORT).status_code == 200
    assert not mark.exists()
    package = Path(inferplane.__file__).parent
    for path in (*package.glob("serving/**/*.py"), *package.glob("engine/clients/**/*.py")):
        assert "import pickle" not in path.read_text() and "import marshal" not in path.read_text(), path


def test_logs_hold_no_prompts(guarded: Live) -> None:
    """Whole requests, invalid ones and ones that fail; the fixture checks that no key is there at the end."""
    for secret in ("s3cret-one", "s3cret-wrong"):
        for body in (SHORT, {"max_tokens": -1}, {"text": "x"}, {"regex": "sesame("}, {"stop": ["sesame"] * 20}):
            complete(guarded, {**body, "prompt": "sesame-open"}, **bearer(secret))
        chat = {"messages": [{"role": "user", "content": "sesame-open"}], "max_tokens": 2}
        complete(guarded, chat, CHAT, **bearer(secret))
        complete(guarded, {**chat, "tools": "sesame"}, CHAT, **bearer(secret))
    fields = raw(("text_input", "BYTES", [1], string(b"sesame-open")), ("sesame", "BYTES", [1], string(b"sesame")))
    with grpc.insecure_channel(address(guarded)) as channel, pytest.raises(grpc.RpcError):
        call(channel, "ModelInfer", metadata=[("authorization", "Bearer s3cret-one")], **fields)
    secret = httpx.get(f"{guarded.url}/nowhere", headers={**bearer("s3cret-one"), "x-request-id": "last-of-them"})
    assert secret.status_code == 404
    guarded.event("request", request_id="last-of-them")
    assert "sesame" not in guarded.text


def test_log_lines_are_not_forged(guarded: Live) -> None:
    forged = "%0a%7B%22event%22%3A%22forged%22%7D%1b%5b31m%E2%80%AE"
    seen = len(guarded.log)
    head = f"GET /evil{forged} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\tb\r\nUser-Agent: {{\r\n\r\n"
    assert status(talk(guarded, head.encode())) == 401
    httpx.get(f"{guarded.url}/nowhere", headers={**bearer("s3cret-one"), "x-request-id": "after-it"})
    guarded.event("request", request_id="after-it")
    lines = [event for event in guarded.log[seen:] if "/evil" in str(event.get("path"))]
    assert len(lines) == 1 and "\\x0a" in lines[0]["path"]
    assert "\x1b" not in guarded.text and "\u202e" not in guarded.text
    assert not any(event["event"] == "forged" for event in guarded.log)


def test_web_pages_cannot_call(live: Live) -> None:
    with live.client() as client:
        asks = {"origin": "https://any.example", "access-control-request-method": "POST"}
        for answer in (client.get("/health", headers=asks), client.options(COMPLETIONS, headers=asks)):
            assert not [name for name in answer.headers if name.startswith("access-control")]
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            answer = client.post(COMPLETIONS, content=BODY, headers={"content-type": kind})
            assert answer.status_code == 415, "what a browser sends without asking"
        assert client.post(COMPLETIONS, content=BODY, headers={"content-type": "application/json"}).status_code == 200
    for host in FOREIGN:
        assert status(talk(live, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())) == 403
