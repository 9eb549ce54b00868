"""Every parameter at and beyond the limits of its range: accepted, or refused with its name."""

from __future__ import annotations

from typing import Any

import pytest

GOOD, BAD = True, False
WRONG_TYPES = ["x", True, [], {}, 1.5]
NUMBERS: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.0, 2, 1e-9], [-1e-9, 2.0001, 1e308]),
    "top_p": ([0, 1e-9, 1, 0.5], [-0.1, 1.0001]),
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31, 2**64]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "frequency_penalty": ([-2, 0, 2], [-2.001, 2.001]),
    "presence_penalty": ([-2, 0, 2], [-2.001, 2.001]),
    "repetition_penalty": ([1e-3, 1, 100], [0, -1, 100.1]),
    "seed": ([-(2**63), 0, 2**63 - 1], [-(2**63) - 1, 2**63, 2**64]),
    "n": ([1, 2], [0, -1, 65, 129]),
    "min_tokens": ([0, 1, 2], [-1, 3, 2**31]),
}
LISTS: dict[str, tuple[list[Any], list[Any]]] = {
    "stop": (["x", ["x"], [], ["é" * 256], ["x"] * 16], ["", [""], ["x" * 257], ["x"] * 17, [1], 5, {}]),
    "stop_token_ids": ([[], [0, 4095], [7] * 1024], [[-1], [4096], [2**31], [7] * 1025, ["x"], [1.5], 5]),
    "logit_bias": (
        [{}, {"0": -100, "4095": 100}, {str(i): 0.5 for i in range(1024)}],
        [
            {"-1": 1},
            {"4096": 1},
            {"x": 1},
            {"1": 100.1},
            {"7": 100, "007": -100},
            {"1": None},
            {"1": "x"},
            [],
            5,
            {str(i): 0 for i in range(1025)},
        ],
    ),
    "ignore_eos": ([True, False], [0, "true", []]),
    "user": (["x", ""], [5, "x" * 5000]),
    "timeout": ([60, 0.5e9], [0, -1, "1", True]),
    "response_format": ([{"type": "text"}, {"type": "json_object"}], [5, {}, {"type": "x"}, {"type": "json_schema"}]),
    "regex": (["x+"], ["(", 5]),
    "grammar": (['start: "x"'], ["nonsense", 5]),
    "guided_json": ([], [{}]),
    "stream_options": ([], [5, {"include_usage": 1}, {}, {"include_usage": True}]),  # without a stream
}
COMPLETIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "max_tokens": ([0, 1, 2], [-1, 2048, 2**31, 2**64, *WRONG_TYPES]),
    "logprobs": ([0, 1, 20], [-1, 21, *WRONG_TYPES]),
    "echo": ([True, False], [0, "true"]),
    "best_of": ([1], [0, 2, 129, "x"]),
    "suffix": ([""], ["x", 5]),
    "prompt": (
        ["x", ["x", "y"], [5], [[5], [6]], "\x00"],
        ["", [], [""], [[]], [-1], [4096], [1.5], ["x", 5], 5, {}, True],
    ),
    "model": (["default", "demo", ""], [5, "x" * 5000]),
}
CHAT: dict[str, tuple[list[Any], list[Any]]] = {
    "max_tokens": ([1, 2], [0, -1, 2048, 2**31]),
    "max_completion_tokens": ([1], [0, 2048, "x"]),
    "top_logprobs": ([0], [1, -1, 21, "x"]),  # more than 0 asks for logprobs, too
    "logprobs": ([True, False], [1, "x"]),
    "tools": ([[]], [5, [{}], [{"type": "function"}], [{"type": "function", "function": {"name": "a b"}}]]),
    "tool_choice": (["none", "auto"], ["required", "any", 5]),
    "modalities": ([["text"]], [["audio"], "text"]),
    "functions": ([], [[], [{}]]),
    "messages": (
        [[{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}]],
        [[], "x", [5], [{"role": "x"}], [{"role": "user", "content": 5}], [{"content": "x"}]],
    ),
}


def cases(table: dict[str, tuple[list[Any], list[Any]]]) -> list[tuple[str, Any, bool]]:
    return [(name, v, ok) for name, values in table.items() for ok, vs in zip((GOOD, BAD), values) for v in vs]


SHARED = cases(NUMBERS) + cases(LISTS) + [(name, v, BAD) for name in NUMBERS for v in ("x", True, [], {})]
NULLS = [name for name in (*NUMBERS, *LISTS) if name != "prompt"]


def ask(client, path: str, name: str, value: Any) -> Any:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 2}
    body.update({"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]})
    body[name] = value
    if name == "max_completion_tokens":
        del body["max_tokens"]
    return client.post(path, json=body)


def check(answer: Any, name: str, value: Any, ok: bool) -> None:
    if ok:
        assert answer.status_code == 200, (name, str(value)[:80], answer.text[:300])
        return
    assert answer.status_code == 400, (name, str(value)[:80], answer.text[:300])
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].split("[")[0].split(".")[0] == name, (name, str(value)[:80], error)
    assert len(answer.text) < 2000


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_shared_parameters(client, path):
    for name, value, ok in SHARED:
        check(ask(client, path, name, value), name, value, ok)
    for name in NULLS:
        check(ask(client, path, name, None), name, None, GOOD)


def test_completions(client):
    for name, value, ok in cases(COMPLETIONS):
        check(ask(client, "/v1/completions", name, value), name, value, ok)


def test_chat(client):
    for name, value, ok in cases(CHAT):
        check(ask(client, "/v1/chat/completions", name, value), name, value, ok)


def test_there_are_enough_of_them():
    assert 2 * (len(SHARED) + len(NULLS)) + len(cases(COMPLETIONS)) + len(cases(CHAT)) >= 400


@pytest.mark.parametrize(
    ("schema", "ok"),
    [
        ({"type": "object"}, GOOD),
        ({"enum": ["x"]}, GOOD),
        ({"type": "nope"}, BAD),
        ({"$ref": "#/nowhere"}, BAD),
        ({"$ref": "https://example.com/schema.json"}, BAD),
        ({"$ref": "file:///etc/passwd"}, BAD),
        ({"type": "string", "pattern": "("}, BAD),
        ({"enum": ["x" * 70_000]}, BAD),
    ],
)
def test_schemas_of_answers(client, schema, ok):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    check(ask(client, "/v1/chat/completions", "response_format", form), "response_format", form, ok)


def test_a_schema_that_explodes_is_refused_and_others_go_on(client, server):
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = {"anyOf": [{"type": "array", "items": deep}, {"type": "object", "properties": {"a": deep}}]}
        if len(str(deep)) > 50_000:
            break
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
    answer = ask(client, "/v1/chat/completions", "response_format", form)
    assert answer.status_code in (200, 400)
    assert ask(client, "/v1/completions", "prompt", "x").status_code == 200


@pytest.mark.parametrize("stream", [False, None])
def test_options_of_a_stream_are_for_streams(client, stream):
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream_options": {"include_usage": True}}
    for path, more in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "x"})):
        answer = client.post(path, json={**asked, **more, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
        answer = client.post(path, json={**asked, **more, "stream": stream, "stream_options": None})
        assert answer.status_code == 200
        answer = client.post(path, json={**asked, **more, "stream": True})
        assert answer.status_code == 200 and '"usage":{' in answer.text


LONG = "The quick brown fox jumps. " * 110_000  # three million characters for a model of 2048 tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["x", LONG]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/completions", {"text": LONG}, "text"),
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
    ],
)
def test_a_text_far_beyond_the_limit(client, path, body, param):
    answer = client.post(path, json=body)
    said = answer.json()
    assert answer.status_code == 400, answer.text[:300]
    error = said.get("error") or {"message": said["error_msg"], "param": said["param"]}
    assert "2970000 characters" in error["message"] and "more than 2048 tokens" in error["message"]
    assert error["param"] == param and error.get("code", "context_length_exceeded") == "context_length_exceeded"


def test_unknown_fields_are_named_in_a_header(client):
    answer = ask(client, "/v1/completions", "frobnicate", {"deep": 1})
    assert answer.status_code == 200
    assert answer.headers["x-inferplane-ignored"] == "frobnicate"
    answer = ask(client, "/v1/completions", "evil\r\nx-injected: 1", 1)
    assert answer.status_code == 200
    assert "x-injected" not in answer.headers


def test_every_refusal_is_counted(server, client):
    counted = 'inferplane:requests_rejected_total{reason="%s"}'
    before = server.metrics()
    for body in ({"prompt": "x", "temperature": -1}, {"prompt": "x", "max_tokens": 1, "stop": "x" * 257}, {"text": ""}):
        assert client.post("/v1/completions", json=body).status_code == 400
    assert client.post("/v1/completions", json={"prompt": "x", "model": "gpt"}).status_code == 404
    assert client.post("/v1/embeddings", json={"input": "x", "dimensions": 0}).status_code == 400
    after = server.metrics()
    for reason, count in (("invalid_value", 4), ("model_not_found", 1)):
        assert after[counted % reason] - before.get(counted % reason, 0) == count
