"""Lists and mappings in requests: their length before their items, one error instead of a million, and what they cost.

The class of advisory: uncontrolled resource consumption by a small request (a body of some MB that stops the server for
everybody, or that grows in memory to many times its size).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic_core import from_json

from inferplane.dialogue.messages import MessageError, normalize_messages
from inferplane.dialogue.near_names import search
from inferplane.dialogue.template import Template, forms
from inferplane.serving.bodies import (
    LARGE_BYTES,
    MAX_CONTAINERS,
    MAX_KEYS,
    PIECE_BYTES,
    BodyMemory,
    object_bytes,
    parse_json,
)
from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.errors import ApiError
from inferplane.serving.grpc import schema, tensors
from inferplane.serving.http.completions import CompletionRequest
from inferplane.serving.http.embeddings import EmbeddingRequest
from inferplane.serving.http.tokens import DetokenizeRequest, TokenizeRequest
from inferplane.serving.kserve.requests import parse_infer_request
from inferplane.serving.native import NativeRequest
from inferplane.serving.threads import SWITCH_S, switch_threads_often
from inferplane.serving.wire import validate
from tests.serving.live import Live

MANY = 10**5
CPU_S = 0.45
"""Three times what the most expensive of these takes (0.14 s). One error for each item took 0.5 to 3.8 s."""
SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Route, the other fields, and the path of the list.
LISTS = [
    (COMPLETIONS, {}, ("prompt",)),
    (COMPLETIONS, {"prompt": "x"}, ("stop",)),
    (COMPLETIONS, {"prompt": "x"}, ("stop_token_ids",)),
    (CHAT, {}, ("messages",)),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, ("messages", 0, "content")),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": []}]}, ("messages", 0, "tool_calls")),
    (CHAT, SAY, ("tools",)),
    (CHAT, SAY, ("modalities",)),
    (CHAT, SAY, ("documents",)),
    (CHAT, SAY, ("stop",)),
    ("/v1/embeddings", {}, ("input",)),
    ("/tokenize", {}, ("messages",)),
    ("/tokenize", SAY, ("tools",)),
    ("/tokenize", SAY, ("documents",)),
    ("/detokenize", {}, ("tokens",)),
    (COMPLETIONS, {}, ("input_ids",)),
    (COMPLETIONS, {"max_dec_len": 4}, ("messages",)),
    (COMPLETIONS, {"text": "x"}, ("eos_token_ids",)),
    (COMPLETIONS, {"text": "x"}, ("stop_sequences",)),
]
MAPPINGS = [
    (COMPLETIONS, {"prompt": "x"}, ("logit_bias",)),
    (CHAT, SAY, ("logit_bias",)),
    (CHAT, SAY, ("chat_template_kwargs",)),
    ("/tokenize", SAY, ("chat_template_kwargs",)),
    (CHAT, SAY, ("stream_options",)),
    (CHAT, {"messages": [{}]}, ("messages", 0)),
    (CHAT, {"messages": [{"role": "user"}]}, ("messages", 0, "content")),
    (COMPLETIONS, {}, ()),
]


def fill(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> bytes:
    """A body with a value at a path."""
    whole = here = json.loads(json.dumps(body))
    if not path:
        return json.dumps({**whole, **value}).encode()
    for step in path[:-1]:
        here = here[step]
    if isinstance(here, list):
        here[path[-1]] = value
    else:
        here.update({path[-1]: value})
    return json.dumps(whole).encode()


def cpu_s(server: Live) -> float:
    """Seconds of processor time that a server has used."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def rss(server: Live, name: str = "VmRSS") -> float:
    """MB of memory that a server has, or had at most (VmHWM)."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024


def post(client: Any, path: str, body: bytes) -> Any:
    return client.post(path, content=body, headers={"content-type": "application/json"})


def check_refused(server: Live, client: Any, case: tuple[str, dict[str, Any], tuple[Any, ...]], value: Any) -> None:
    path, others, where = case
    before = cpu_s(server)
    answer = post(client, path, fill(others, where, value))
    used = cpu_s(server) - before
    assert answer.status_code == 400, (case, answer.text[:300])
    assert len(answer.text) < 2000
    error = answer.json().get("error") or answer.json()
    assert error.get("code") == "too_many" or str(error["param"]).startswith(tuple(str(s) for s in where[:1])), error
    assert used < CPU_S, (case, used)


@pytest.mark.parametrize("case", LISTS, ids=lambda c: f"{c[0]} {c[2]}")
def test_wrong_items_of_a_list_cost_one_error(server, client, case):
    for item in ([], {}, None, 1.5, "", {"a": "b"}):
        if isinstance(item, dict) and case[2] == ("documents",):
            continue  # these are right
        check_refused(server, client, case, [item] * MANY)


@pytest.mark.parametrize("case", MAPPINGS, ids=lambda c: f"{c[0]} {c[2]}")
def test_wrong_keys_of_a_mapping_cost_one_error(server, client, case):
    if case[2] == ("stream_options",):
        case = (case[0], {**case[1], "stream": True}, case[2])
    for value in (1, [], "x"):
        check_refused(server, client, case, {f"name {i}": value for i in range(MANY)})


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (CompletionRequest, {"prompt": "x", "stop": ["y"] * MANY}, "at most 16"),
        (CompletionRequest, {"prompt": "x", "logit_bias": {"x": 1} | {str(i): 1 for i in range(MANY)}}, "at most 1024"),
        (CompletionRequest, {"prompt": [[]] * MANY}, "prompt"),
        (ChatRequest, {**SAY, "tools": [{}] * MANY}, "at most 128"),
        (ChatRequest, {**SAY, "chat_template_kwargs": {str(i): 1 for i in range(65)}}, "at most 64"),
        (ChatRequest, {**SAY, "modalities": ["text"] * 9}, "at most 8"),
        (EmbeddingRequest, {"input": [{}] * MANY}, "input"),
        (TokenizeRequest, {**SAY, "documents": [{}] * 1025}, "at most 1024"),
        (DetokenizeRequest, {"tokens": ["x"] * MANY}, "tokens[0]"),
        (NativeRequest, {"text": "x", "eos_token_ids": [1] * 17}, "at most 16"),
        (NativeRequest, {"input_ids": [None] * MANY}, "input_ids[0]"),
        (NativeRequest, {"messages": [{"content": "x"}] * 2049}, "at most 2048"),
    ],
)
def test_first_error_only(model, data, message):
    started = time.thread_time()
    with pytest.raises(ApiError) as refused:
        validate(model, data)
    assert message in refused.value.message
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize(
    ("path", "field", "value", "code"),
    [
        (COMPLETIONS, "prompt", [5] * 3000, "context_length_exceeded"),
        (COMPLETIONS, "prompt", ["x", *[-1] * 3000], "too_many"),
        (COMPLETIONS, "prompt", [[5], [-1] * 3000], "context_length_exceeded"),
        (COMPLETIONS, "prompt", [-1] * 3000, "context_length_exceeded"),
        (COMPLETIONS, "prompt", ["x"] * 65, "too_many"),
        (COMPLETIONS, "input_ids", [-1] * 3000, None),
        ("/v1/embeddings", "input", [-1] * 3000, "context_length_exceeded"),
        ("/v1/embeddings", "input", [[5], [-1] * 3000], "context_length_exceeded"),
        ("/detokenize", "tokens", [-1] * 3000, "context_length_exceeded"),
    ],
)
def test_length_is_looked_at_before_items(client, path, field, value, code):
    answer = client.post(path, json={field: value})
    assert answer.status_code == 400, answer.text
    found = answer.json().get("error") or answer.json()
    assert found["param"] == field and found.get("code") == code


def test_what_fits_is_still_answered(client):
    longest = client.get("/v1/models").json()["data"][0]["max_model_len"]
    ids = [5] * (longest - 1)
    assert client.post(COMPLETIONS, json={"prompt": ids, "max_tokens": 1}).status_code == 200
    assert client.post("/v1/embeddings", json={"input": [ids, ids]}).status_code == 200
    text = client.post("/detokenize", json={"tokens": [*ids, 5]})
    assert text.status_code == 200 and len(text.json()["prompt"]) >= longest
    assert client.post("/tokenize", json={"prompt": "x " * 600}).status_code == 200
    messages = [{"role": "user", "content": "[{" * 40_000}]  # marks inside of texts are no values
    answer = client.post("/tokenize", json={"messages": messages})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


BODIES = {
    "empty lists": ("[]", "[%s]"),
    "nested lists": ("[[[]]]", "[%s]"),
    "empty objects": ("{}", "[%s]"),
    "small objects": ('{"a":1}', "[%s]"),
    "larger objects": ('{"a":1,"b":2.5,"c":"xyz"}', "[%s]"),
    "numbers": ("48000", "[%s]"),
    "small numbers": ("5", "[%s]"),
    "fractions": ("1.5", "[%s]"),
    "nulls": ("null", "[%s]"),
    "long texts": ('"' + "x" * 100 + '"', "[%s]"),
    "messages": ('{"role":"user","content":"x"}', '{"messages":[%s]}'),
}


@pytest.mark.parametrize("kind", [*BODIES, "different texts", "keys", "one text", "one wide text", "escapes"])
def test_objects_cost_at_most_what_is_charged(kind):
    if kind in BODIES:
        unit, around = BODIES[kind]
        body = (around % ",".join([unit] * 20_000)).encode()
    else:
        body = {
            "different texts": json.dumps([f"é{i}" for i in range(20_000)], ensure_ascii=False),
            "keys": json.dumps({str(i): 1 for i in range(20_000)}),
            "one text": json.dumps("[{,:" * 50_000),
            "one wide text": '"' + "x" * 100_000 + '\U0001f600"',
            "escapes": '"' + "\\u00e9" * 10_000 + "\\u4e00" * 20_000 + '"',
        }[kind].encode()
    tracemalloc.start()
    try:
        values = from_json(body)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    del values
    assert size <= object_bytes(body), (kind, size / len(body))
    if "text" in kind or kind == "escapes":
        assert object_bytes(body) <= 70 * max(len(body), 1)
    if kind == "one text":
        assert object_bytes(body) < 3 * len(body), "marks in a text are no values"


@pytest.mark.parametrize("unit", ["[]", "{}", "[[[]]]", '{"a":[]}', '"\\\\",[]', '"\\"",{}'])
def test_too_many_arrays_and_objects_are_not_built(unit):
    body = f"[{','.join([unit] * MAX_CONTAINERS)}]"
    for text in (body, body.encode()):
        with pytest.raises(ApiError, match="arrays and objects") as refused:
            parse_json(text)
        assert refused.value.code == "too_many"
    assert len(parse_json(f"[{','.join(['1'] * 2 * MAX_CONTAINERS)}]")) == 2 * MAX_CONTAINERS
    text = "[{" * MAX_CONTAINERS + '\\"'
    assert parse_json(json.dumps([text, {"a": text}])) == [text, {"a": text}]


@pytest.mark.parametrize(
    "text", ['["', '["\\', "[" * 70_000, '{"a":' * 70_000, '["\\"]', "x" * 70_000, '"\\" [' * 30_000]
)
def test_what_is_no_json_is_counted_and_refused(text):
    assert object_bytes(text.encode()) > 0
    with pytest.raises((ValueError, ApiError)):
        parse_json(text)


@pytest.mark.parametrize("seed", range(4))
def test_marks_in_texts_are_no_values_wherever_a_piece_ends(seed):
    """The same containers, whatever lies before and between them; texts that hold as many marks again."""
    draw = random.Random(seed)
    texts = [draw.choice(('"', "\\", "[{", 'a"[', "é")) * draw.randrange(1, 40) for _ in range(4000)]
    body = json.dumps([draw.randrange(10**6), *([t] for t in texts), "[" * MAX_CONTAINERS], ensure_ascii=False)
    assert len(body) > 3 * PIECE_BYTES
    assert len(parse_json(body)) == len(texts) + 2
    full = json.dumps([*json.loads(body), [[]] * MAX_CONTAINERS])
    with pytest.raises(ApiError, match=rf"^{len(texts) + MAX_CONTAINERS + 2} arrays and objects"):
        parse_json(full)


def test_no_call_divides_a_whole_body():
    """C code keeps Python's lock from the event loop: a million short texts are divided by many calls, none long."""
    body = b"[" + b'"a",' * 10**6 + b"1]"
    started = time.thread_time()
    whole = len(body.split(b'"'))
    at_once_s = time.thread_time() - started
    times: list[float] = []

    def watch(frame, event, function):
        if event == "c_call" and function.__name__ == "split":
            times.append(-time.thread_time())
        elif event == "c_return" and function.__name__ == "split":
            times[-1] += time.thread_time()

    sys.setprofile(watch)
    try:
        size = object_bytes(body)
    finally:
        sys.setprofile(None)
    assert whole > 10**6 and size > 64 * 10**6
    assert len(times) == len(body) // PIECE_BYTES + 1
    assert max(times) < at_once_s / 4


def test_threads_that_serve_wait_for_each_other_for_half_a_millisecond():
    before = sys.getswitchinterval()
    try:
        switch_threads_often()
        assert before > SWITCH_S and sys.getswitchinterval() == pytest.approx(SWITCH_S)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({f"role{i}": 1 for i in range(MANY)}, "messages[0]"),
        ({"role": "user", "content": {f"a{i}": i for i in range(MANY)}}, "messages[0].content"),
        ({"role": "user", "content": [{f"a{i}": i for i in range(MANY)}]}, "messages[0].content[0]"),
        ({"role": {f"a{i}": i for i in range(MANY)}, "content": "x"}, "messages[0].role"),
        ({"roles" + "x" * 10**6: "user", "content": "x"}, "messages[0].role"),
        ({"role": "assistant", "tool_calls": [[]] * MANY}, "messages[0].tool_calls[0]"),
    ],
)
def test_message_is_refused_without_looking_at_all_of_it(message, param):
    started = time.thread_time()
    with pytest.raises(MessageError) as refused:
        normalize_messages([message])
    assert refused.value.param == param and len(str(refused.value)) < 1000
    assert time.thread_time() - started < 0.5


def with_arguments(text: Any) -> list[dict[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": text}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]


ARGUMENTS = {
    "lists": '{"a":[' + "[]," * 600_000 + "[]]}",
    "numbers": ' {"a": [' + ",".join(["1.5"] * 500_000) + "]}",
    "keys": "{" + ",".join(f'"k{i}":1' for i in range(100_000)) + "}",
    "behind a text": '{"\\"[,": [' + "[]," * 600_000 + "[]]}",
    "a mapping": {f"k{i}": [] for i in range(100_000)},
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_values_in_the_text_of_arguments_are_counted_before_they_are_parsed(kind):
    started = time.thread_time()
    with pytest.raises(MessageError, match="more than 65536 values") as refused:
        normalize_messages(with_arguments(ARGUMENTS[kind]))
    assert refused.value.param == "messages[1].tool_calls[0].function.arguments"
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize("text", ["[" + "[]," * 600_000 + "[]]", "[" * 600_000, '"' + "," * 600_000])
def test_many_values_that_are_no_object_stay_text_and_are_not_parsed(text):
    started = time.thread_time()
    messages = normalize_messages(with_arguments(text))
    [data, *_] = forms(Template("", {}), messages)
    assert data[1]["tool_calls"][0]["function"]["arguments"] == text
    assert time.thread_time() - started < 0.5


def test_values_of_many_calls_count_together():
    call = with_arguments("[" + "1," * 2000 + "1]")[1]
    assert normalize_messages([call] * 30)
    with pytest.raises(MessageError, match=r"up to messages\[32\]"):
        normalize_messages([call] * 40)


def test_what_looks_like_values_in_a_long_text_does_not_count():
    text = json.dumps({"file": 'a = {"b": [1, 2]},\\\n' * 50_000})
    assert normalize_messages(with_arguments(text))[1]["tool_calls"][0]["function"]["arguments"] == text


def test_arguments_are_parsed_once_for_all_forms_and_long_integers_are_not():
    digits = "[" + ",".join(["9" * 4200] * 900) + "]"
    template = Template("{% if m.content is none %}{% endif %}", {})
    messages = normalize_messages(with_arguments(digits))
    started = time.thread_time()
    found = list(forms(template, messages))
    assert len(found) == 6
    assert found[0][1]["tool_calls"][0]["function"]["arguments"] == digits  # as text
    assert time.thread_time() - started < 0.5
    [data, *_] = forms(template, normalize_messages(with_arguments('{"a": 12345678901234567890}')))
    assert data[1]["tool_calls"][0]["function"]["arguments"] == {"a": 12345678901234567890}


def test_too_many_keys_are_not_built():
    body = json.dumps({f"k{i}": 1 for i in range(MAX_KEYS + 1)})
    for text in (body, body.encode()):
        with pytest.raises(ApiError, match="keys; at most") as refused:
            parse_json(text)
        assert refused.value.code == "too_many"
    fits = {**{f"k{i}": 1 for i in range(MAX_KEYS - 1)}, "text": ":" * MAX_KEYS}
    assert parse_json(json.dumps(fits)) == fits


def test_long_names_are_not_kept():
    before = search.cache_info().currsize
    for i in range(20):
        validate(CompletionRequest, {"prompt": "x", f"{i}" + "y" * 10**6: 1})
    assert search.cache_info().currsize == before


# -- gRPC


def infer(*inputs: dict[str, Any], raw: list[bytes] = ()) -> Any:
    request = schema.message("ModelInferRequest")()
    for fields in inputs:
        request.inputs.add(**fields)
    request.raw_input_contents.extend(raw)
    return request


@pytest.mark.parametrize(
    ("request_of", "param"),
    [
        (lambda: infer({"name": "input_ids", "datatype": "UINT8", "shape": [10**6]}, raw=[bytes(10**6)]), "input_ids"),
        (
            lambda: infer({"name": "text_input", "datatype": "BYTES", "shape": [MANY]}, raw=[bytes(4 * MANY)]),
            "text_input",
        ),
        (lambda: infer({"name": "text_input", "datatype": "BYTES", "shape": [1]}, raw=[bytes(4 * MANY)]), "text_input"),
        (lambda: infer({"name": "n", "datatype": "INT32", "shape": [1]}, raw=[bytes(4 * MANY)]), "n"),
        (lambda: infer({"name": "n", "datatype": "INT32", "shape": [1] * MANY}, raw=[bytes(4)]), "n"),
        (lambda: infer(*({"name": str(i), "datatype": "INT32", "shape": [1]} for i in range(1000))), "inputs"),
        (lambda: infer(raw=[b""] * 1000), "raw_input_contents"),
    ],
)
def test_tensors_are_counted_before_they_are_converted(request_of, param):
    request = request_of()
    started = time.thread_time()
    with pytest.raises(ApiError) as refused:
        tensors.read(request, {"input_ids": 2048})
    assert refused.value.param == param
    assert time.thread_time() - started < 0.2


def test_tensors_of_the_right_length_are_read():
    request = infer(
        {"name": "input_ids", "datatype": "INT64", "shape": [1, 3]},
        {"name": "text_input", "datatype": "BYTES", "shape": [1]},
        raw=[bytes([1, *[0] * 7]) * 3, b"\2\0\0\0ab"],
    )
    assert tensors.read(request, {"input_ids": 3}) == {"input_ids": [1, 1, 1], "text_input": [b"ab"]}


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"max_tokens": 2, "json_schema": json.dumps({"enum": [[]] * 500_000})}, "json_schema"),
        ({"max_tokens": "[" + "[]," * 500_000 + "[]]"}, "max_tokens"),
        ({"unknown": "[" + "[]," * 500_000 + "[]]"}, "unknown"),
        ({f"k{i}": 1 for i in range(30_000)}, None),
        ({f"k{i}": 1 for i in range(280_000)}, None),
    ],
)
def test_long_sampling_parameters_are_read_in_a_thread_and_texts_in_them_are_not_parsed(extra, param):
    text = json.dumps(extra).encode()
    request = infer(
        {"name": "text_input", "datatype": "BYTES", "shape": [1]},
        {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1]},
        raw=[b"\1\0\0\0x", len(text).to_bytes(4, "little") + text],
    )
    lengths: list[int] = []

    class Reader:
        ready_model = SimpleNamespace(info=SimpleNamespace(max_model_len=64))

        async def read(self, num_bytes: int, function: Any, *args: Any) -> Any:
            lengths.append(num_bytes)
            return function(*args)

    started = time.thread_time()
    given, parameters = tensors.read(request, {}), tensors.parameters(request)
    with pytest.raises(ApiError) as refused, BodyMemory(10**9).hold() as held:
        asyncio.run(parse_infer_request(given, parameters, "", Reader(), held))
    assert refused.value.param == param
    assert lengths == [len(text)] * 2 and min(lengths) > LARGE_BYTES
    assert time.thread_time() - started < 0.5


# -- the budget


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    with Live("--max-held-bytes", "64MiB") as live:
        yield live
        assert live.stop() == 0


@pytest.mark.parametrize("unit", ["48000", '"a"', '{"a":1}', "[]"])
def test_large_bodies_at_once_stay_within_the_budget(small, unit):
    size = 2**20
    body = f'{{"prompt":[{",".join([unit] * (size // (len(unit) + 1)))}]}}'.encode()
    with small.client() as client:
        before = rss(small)
        with ThreadPoolExecutor(24) as senders:
            answers = list(senders.map(lambda _: post(client, COMPLETIONS, body), range(24)))
        assert {a.status_code for a in answers} <= {400, 503}
        busy = [a for a in answers if a.status_code == 503]
        assert all(a.json()["error"]["code"] == "busy" and a.headers["retry-after"] for a in busy)
        assert len(busy) < 24
        assert rss(small, "VmHWM") - before < 64 + 64, "beside the budget: what connections hold"
        assert post(client, COMPLETIONS, b'{"prompt":"x","max_tokens":1}').status_code == 200
        small.at_rest()
