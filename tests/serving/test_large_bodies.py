"""Large bodies: another process says of each what this one would say, and may hang, crash or end without harm.

The class of advisory: uncontrolled resource consumption by a small request (a body of some MB whose parsing stops every
stream of the process that serves).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferplane.serving.admission import PromptLimits
from inferplane.serving.bodies import LARGE_BYTES, object_bytes
from inferplane.serving.errors import ApiError
from inferplane.serving.http.body_checks import ALIASES, CHAT, COMPLETIONS, DETOKENIZE, EMBEDDINGS, READ, TOKENIZE
from inferplane.serving.large_bodies import reader
from inferplane.serving.large_bodies.reader import CheckedBody, InvalidBody, LargeBodyReader
from inferplane.serving.wire import parse, unknown_fields
from tests.serving.live import Live, engine_pids
from tests.serving.test_lists import LISTS, MAPPINGS, SAY, fill

LIMITS = PromptLimits(64, 512, 2048)
MAX_BODY_BYTES = 4 * 2**20
PAD = "x" * LARGE_BYTES
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "a": PAD}}}


@pytest.fixture(scope="module")
def bodies() -> Iterator[LargeBodyReader]:
    made = LargeBodyReader(MAX_BODY_BYTES)
    yield made
    made.close()


def _lists() -> Iterator[tuple[str, bytes]]:
    for path, others, where in LISTS:
        for item in ([], None, 1.5, -1, "a"):
            yield path, fill(others, where, [item] * 30_000)
    for path, others, where in MAPPINGS:
        for value in (1, None):
            yield path, fill(others, where, {f"name {i}": value for i in range(9000)})


def _others() -> Iterator[tuple[str, bytes]]:
    """Bodies that are right, and wrong in other ways."""
    ids = list(range(500))
    fields: tuple[tuple[str, Any], ...] = (
        (COMPLETIONS, {"prompt": "é\u0001\ud7ff\U0001f600" * 20_000, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [ids] * 40, "temperature": 0.1, "logit_bias": {"5": 1e-5}}),
        (COMPLETIONS, {"prompt": "x", "metadata": {"a": [PAD, 2**70, 1e308]}, "user": "u", "seed": 2**63 - 1}),
        (COMPLETIONS, {"prompt": "x", "metadata": PAD, "store": [None], "priority": 5, "unheard_of": {"b": []}}),
        (COMPLETIONS, {"prompt": PAD, "temperatur": 1}),
        (COMPLETIONS, {"prompt": PAD, "suffix": "x"}),
        (COMPLETIONS, {"prompt": PAD, "stream_options": {"include_usage": "x"}}),
        (COMPLETIONS, {"text": PAD, "req_id": "job-1", "max_dec_len": 0}),
        (COMPLETIONS, {"text": PAD, "req_id": "a b"}),
        (COMPLETIONS, {"text": PAD, "req_id": 5}),
        (COMPLETIONS, {"text": PAD, "prompt": "x"}),
        (COMPLETIONS, {"text": PAD, "metadata": [PAD]}),
        (CHAT, {"messages": [{"role": "user", "content": PAD, "more": {"a": None}}]}),
        (CHAT, {"messages": [{"role": "nobody", "content": PAD}]}),
        (CHAT, {**SAY, "tools": [TOOL], "prediction": {"content": PAD}}),
        (CHAT, {**SAY, "tools": [TOOL, TOOL]}),
        (CHAT, {**SAY, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
        (CHAT, {**SAY, "stream_options": {}, "user": "x" * 10, "metadata": {"a": PAD}}),
        (CHAT, {"input_ids": ids, "response_type": PAD}),
        (EMBEDDINGS, {"input": [PAD], "dimensions": 0}),
        (EMBEDDINGS, {"input": [ids] * 64}),
        (TOKENIZE, {"prompt": PAD}),
        (TOKENIZE, {"prompt": PAD, "add_special_tokens": 1}),
        (DETOKENIZE, {"tokens": [5] * 2048, "metadata": PAD}),
        (DETOKENIZE, {"tokens": [5] * 2047 + [-1], "metadata": PAD}),
    )
    for path, body in fields:
        yield path, json.dumps(body).encode()
    for path in (COMPLETIONS, *ALIASES):
        for text in (
            "[" * 70_000,
            '{"prompt":"' + PAD,
            f'["{PAD}"]',
            f'{{"prompt":NaN,"a":"{PAD}"}}',
            "{}" + " " * 70_000,
        ):
            yield path, text.encode()
    yield COMPLETIONS, b'{"prompt":"' + b"\xff" * LARGE_BYTES + b'"}'
    yield COMPLETIONS, b'{"prompt":"x","seed":' + b"9" * LARGE_BYTES + b"}"
    yield COMPLETIONS, b'{"prompt":"x","metadata":[' + b"9" * LARGE_BYTES + b"]}"
    yield COMPLETIONS, b'{"prompt":"x","metadata":[1e999,"' + PAD.encode() + b'"]}'


def _here(path: str, body: bytes) -> Any:
    """The request that this process makes of a body, and what of it has no effect; or its error."""
    try:
        request = READ[path](parse(body), LIMITS)
    except ApiError as error:
        return error.status, error.message, error.param, error.code, None
    except InvalidBody as refused:
        error = refused.error
        return error.status, error.message, error.param, error.code, refused.fields
    return request.model_dump(exclude=set(request.model_extra or ())), unknown_fields(request)


def _there(bodies: LargeBodyReader, path: str, body: bytes) -> Any:
    """The same, if the other process checks the body first."""
    try:
        found = bodies.check(path, body, LIMITS)
    except ApiError as error:
        return error.status, error.message, error.param, error.code, None
    except InvalidBody as refused:
        error = refused.error
        return error.status, error.message, error.param, error.code, refused.fields
    assert found.value_bytes == object_bytes(found.body) and len(found.body) <= len(body)
    return _here(path, found.body)


def test_the_other_process_says_of_lists_what_this_one_says(bodies: LargeBodyReader) -> None:
    given = [*_lists()]
    assert min(len(body) for _, body in given) > LARGE_BYTES
    for path, body in given:
        assert _there(bodies, path, body) == _here(path, body), (path, body[:200])


def test_the_other_process_says_of_other_bodies_what_this_one_says(bodies: LargeBodyReader) -> None:
    found = []
    for path, body in _others():
        assert len(body) > LARGE_BYTES
        here = _here(path, body)
        assert _there(bodies, path, body) == here, (path, body[:200])
        found.append(here[0] if isinstance(here[0], int) else 200)
    assert found.count(200) >= 10 and found.count(400) >= 20, found


def test_values_of_fields_without_effect_do_not_come_back(bodies: LargeBodyReader) -> None:
    body = json.dumps({"prompt": "x", "metadata": {"a": [[]] * 50_000}, "user": "u"}).encode()
    found = bodies.check(COMPLETIONS, body, LIMITS)
    assert found.body == b'{"prompt":"x","metadata":null,"user":"u"}'
    assert found.value_bytes < 1000
    valid = json.dumps({"prompt": PAD}).encode()
    assert bodies.check(COMPLETIONS, valid, LIMITS) == CheckedBody(valid, object_bytes(valid))


# -- a process that misbehaves


def test_a_process_that_hangs_is_ended_and_another_one_goes_on() -> None:
    made = LargeBodyReader(MAX_BODY_BYTES, check_s=1.0)
    try:
        made.check(COMPLETIONS, b'{"prompt":"x"}', LIMITS)
        assert made.process is not None
        first = made.process.pid
        os.kill(first, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(ApiError, match="takes longer than 1 s") as late:
            made.check(COMPLETIONS, b'{"prompt":"x"}', LIMITS)
        assert 0.9 < time.monotonic() - started < 20
        assert (late.value.status, late.value.code, late.value.retry_after_s) == (503, "reader_failed", 1)
        assert not Path(f"/proc/{first}").exists()
        assert made.check(COMPLETIONS, b'{"prompt":"x"}', LIMITS).body == b'{"prompt":"x"}'
        assert made.process is not None and made.process.pid != first
    finally:
        made.close()
    assert made.process is None


def test_a_process_that_ends_costs_one_request(bodies: LargeBodyReader) -> None:
    bodies.check(COMPLETIONS, b'{"prompt":"x"}', LIMITS)
    assert bodies.process is not None
    pid = bodies.process.pid
    os.kill(pid, signal.SIGSTOP)
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(ApiError, match="the process that does it ended") as ended:
        bodies.check(COMPLETIONS, b'{"prompt":"x"}', LIMITS)
    killer.join()
    assert ended.value.code == "reader_failed"
    assert bodies.check(COMPLETIONS, b'{"prompt":"x"}', LIMITS).body == b'{"prompt":"x"}'


def test_a_process_without_memory_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BASE_MEMORY_BYTES", 300 * 2**20)
    monkeypatch.setattr(reader, "MEMORY_PER_BYTE", 0)
    made = LargeBodyReader(MAX_BODY_BYTES)
    body = json.dumps({"prompt": "x", "metadata": "y" * 200 * 2**20}).encode()
    try:
        with pytest.raises(ApiError) as refused:
            made.check(COMPLETIONS, body, LIMITS)
        assert refused.value.code == "reader_failed"
        assert made.check(COMPLETIONS, b'{"prompt":"x"}', LIMITS).body == b'{"prompt":"x"}'
    finally:
        made.close()


def test_a_reader_that_is_closed_ends_what_it_does_and_starts_nothing() -> None:
    made = LargeBodyReader(MAX_BODY_BYTES)
    made.check(COMPLETIONS, b'{"prompt":"x"}', LIMITS)
    assert made.process is not None
    pid = made.process.pid
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(made.check, COMPLETIONS, b'{"prompt":"x"}', LIMITS)
        time.sleep(0.2)
        made.close()
        with pytest.raises(ApiError):
            waiting.result(20)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ApiError):
        made.check(COMPLETIONS, b'{"prompt":"x"}', LIMITS)
    assert made.process is None
    made.close()


# -- the server


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live("--request-timeout-s", "5") as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.text


def _post(live: Live, path: str, body: Any) -> httpx.Response:
    with live.client() as client:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return client.post(path, content=data, headers={"content-type": "application/json"})


def _helper(live: Live) -> int:
    """The process that checks this server's bodies."""
    name = b"check_process.py"
    found = [pid for pid in engine_pids(live) if name in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1
    return found[0]


def test_answers_to_large_bodies_have_the_form_of_small_ones(live: Live) -> None:
    """Beside a value that has no effect, a request is answered as without it, in its dialect."""
    more = {"metadata": [PAD]}
    for path, body in (
        (COMPLETIONS, {"prompt": "x = ", "max_tokens": 4, "temperature": 0}),
        (COMPLETIONS, {"prompt": "x", "temperature": 5}),
        (COMPLETIONS, {"text": "x = ", "max_dec_len": 4, "topp": 0, "req_id": "job-7"}),
        (COMPLETIONS, {"text": "x", "max_dec_len": 0, "req_id": "job-8"}),
        (COMPLETIONS, {"text": "x", "prompt": "x", "req_id": "job-9"}),
        (EMBEDDINGS, {"input": "x"}),
        (EMBEDDINGS, {"input": []}),
        (TOKENIZE, {"prompt": "x = 5"}),
        (TOKENIZE, {"prompt": "x", "messages": []}),
        (DETOKENIZE, {"tokens": [5, 6]}),
        (DETOKENIZE, {"tokens": [-5]}),
        (CHAT, {"messages": []}),
    ):
        small = _post(live, path, {**body, "metadata": 1})
        large = _post(live, path, {**body, **more})
        assert large.status_code == small.status_code, large.text
        assert large.headers.get("x-inferplane-ignored") == small.headers.get("x-inferplane-ignored")
        left = ("id", "created", "x")
        assert {k: v for k, v in large.json().items() if k not in left} == {
            k: v for k, v in small.json().items() if k not in left
        }


def test_a_server_whose_process_for_bodies_is_lost_goes_on(live: Live) -> None:
    """A body that is checked when that process is killed gets a clear error; so does one that it does not end."""
    body = {"prompt": "x", "max_tokens": 1, "metadata": [PAD]}
    assert _post(live, COMPLETIONS, body).status_code == 200
    pid = _helper(live)
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(_post, live, COMPLETIONS, body)
        time.sleep(0.5)
        assert _post(live, COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status_code == 200
        os.kill(pid, signal.SIGKILL)
        answer = waiting.result(30)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "reader_failed"
    assert answer.headers["retry-after"] == "1"
    assert _post(live, COMPLETIONS, body).status_code == 200
    os.kill(_helper(live), signal.SIGSTOP)
    started = time.monotonic()
    late = _post(live, COMPLETIONS, body)
    assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
    assert 4.5 < time.monotonic() - started < 12
    live.at_rest()


def test_a_body_needs_a_key_before_it_is_checked(tmp_path: Path) -> None:
    with Live("--api-key", "secret") as server:
        assert _post(server, COMPLETIONS, {"prompt": PAD, "temperature": 9}).status_code == 400
        pid = _helper(server)
        os.kill(pid, signal.SIGSTOP)
        server.use_key("wrong")
        assert _post(server, COMPLETIONS, {"prompt": PAD}).status_code == 401
        server.use_key("secret")
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(_post, server, COMPLETIONS, {"prompt": PAD, "temperature": 9})
            time.sleep(0.3)
            assert server.stop() == 0, "it ends while a body waits"
            with pytest.raises(httpx.HTTPError):
                waiting.result(30).raise_for_status()
        assert not Path(f"/proc/{pid}").exists()
