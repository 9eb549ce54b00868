"""The wire formats without a server: what they parse, render and refuse, and which field an error names."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.errors import ApiError
from inferplane.serving.http.completions import CompletionRequest
from inferplane.serving.http.embeddings import EmbeddingRequest
from inferplane.serving.model import ServedModel
from inferplane.serving.native import NativeRequest, is_native
from inferplane.serving.rendering import Frames, encode_event
from inferplane.serving.request_fields import CONSTRAINTS
from inferplane.serving.settings import ServerSettings
from inferplane.serving.wire import parse, unknown_fields, validate

# ---------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"1", b'"x"', b"null", b"{'a': 1}", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}'),
        *(b'{"a": 1,}', b'\xff{"a": 1}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"a": 01}', b'{"a": 1} x'),
        b"[" * 100_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    ],
)
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(ApiError) as refused:
        parse(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_numbers_too_large_for_their_field_are_refused():
    for text in (b"1e999", b"123456789012345678901234567890"):
        with pytest.raises(ApiError) as refused:
            validate(CompletionRequest, parse(b'{"prompt": "x", "temperature": ' + text + b"}"))
        assert refused.value.param == "temperature"


@pytest.mark.parametrize(
    ("model", "data", "param"),
    [
        (CompletionRequest, {}, "prompt"),
        (CompletionRequest, {"prompt": []}, "prompt"),
        (CompletionRequest, {"prompt": ""}, "prompt"),
        (CompletionRequest, {"prompt": [1, "x"]}, "prompt[1]"),
        (CompletionRequest, {"prompt": ["x", 1]}, "prompt[1]"),
        (CompletionRequest, {"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        (CompletionRequest, {"prompt": [[1], [True]]}, "prompt[1][0]"),
        (CompletionRequest, {"prompt": {"a": 1}}, "prompt"),
        (CompletionRequest, {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        (CompletionRequest, {"prompt": "x", "max_tokens": 5.5}, "max_tokens"),
        (CompletionRequest, {"prompt": "x", "stream": 1}, "stream"),
        (CompletionRequest, {"prompt": "x", "stop": [""]}, "stop[0]"),
        (CompletionRequest, {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias.x"),
        (CompletionRequest, {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1"),
        (CompletionRequest, {"prompt": "x", "suffix": "y"}, "suffix"),
        (ChatRequest, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        (ChatRequest, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (ChatRequest, {"messages": "hi"}, "messages"),
        (ChatRequest, {"messages": [{"role": "user"}], "tools": [{"type": "x"}]}, "tools[0].type"),
        (ChatRequest, {"messages": [{"role": "user"}], "response_format": {"type": "x"}}, "response_format.type"),
        (ChatRequest, {"messages": [{"role": "user"}], "audio": {}}, "audio"),
        (CompletionRequest, {"prompt": "x", "timeout": 0}, "timeout"),
        (ChatRequest, {"messages": [{"role": "user"}], "timeout": -1}, "timeout"),
        (EmbeddingRequest, {"input": "x", "timeout": "1"}, "timeout"),
        (CompletionRequest, {"prompt": "x", "response_format": {"type": "x"}}, "response_format.type"),
        *((CompletionRequest, {"prompt": "x", name: "x"}, name) for name in CONSTRAINTS[3:]),
        (NativeRequest, {"text": "x", "topp": 2}, "topp"),
        (NativeRequest, {"text": "x", "max_dec_len": 0}, "max_dec_len"),
        (NativeRequest, {"text": "x", "req_id": "a b"}, "req_id"),
        (NativeRequest, {"text": "x", "timeout": 0}, "timeout"),
        (NativeRequest, {"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
def test_the_field_that_is_wrong_is_named(model, data, param):
    with pytest.raises(ApiError) as refused:
        validate(model, data)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert param.split("[")[0].split(".")[0] in refused.value.message


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (CompletionRequest, {"prompt": "x", "suffix": "y"}, "suffix: Insertion is not supported."),
        (ChatRequest, {"messages": [{"role": "user"}], "functions": []}, "functions: Not supported: use tools."),
        (ChatRequest, {"messages": [{"role": "user"}], "audio": {}}, "audio: Not supported."),
    ],
)
def test_what_is_not_supported_is_said_to_be(model, data, said):
    with pytest.raises(ApiError) as refused:
        validate(model, data)
    assert refused.value.message == said


@pytest.mark.parametrize(
    ("field", "value", "said"), [("stop", ["x"] * 17, "at most 16"), ("stop", "", "at least 1"), ("prompt", [], "item")]
)
def test_the_error_for_a_value_of_the_right_type_says_what_is_wrong(field, value, said):
    with pytest.raises(ApiError, match=f"^{field}: .*{said}"):
        validate(CompletionRequest, {"prompt": "x", field: value})


def test_falsy_values_are_values():
    request = validate(CompletionRequest, {"prompt": "x", "temperature": 0, "seed": 0, "top_p": 0, "top_k": 0})
    sampling = request.sampling_fields()
    assert (sampling["temperature"], sampling["seed"], sampling["top_k"]) == (0, 0, 0)
    assert 0 < sampling["top_p"] < 1e-3


def test_unknown_fields_are_accepted_and_listed():
    request = validate(CompletionRequest, {"prompt": "x", "wings": 2, "metadata": None})
    assert unknown_fields(request) == ["metadata", "wings"]


def test_dialects_are_distinguished():
    assert is_native({"text": "x"}) and is_native({"messages": [], "req_id": "1"})
    assert not is_native({"messages": [], "max_tokens": 3, "stream": True})


@pytest.mark.parametrize(
    ("path", "body", "mark"),
    [
        (
            "/v1/chat/completions",
            {"model": "demo", "messages": [{"role": "user", "content": "x"}], "topp": 0.1},
            "topp",
        ),
        ("/v1/chat/completions", {"model": "demo", "messages": [{"content": "x"}], "text": "x"}, "text"),
        ("/v1/completions", {"prompt": "x", "text": "y"}, "text"),
        ("/v1/completions", {"model": "demo", "prompt": "x", "req_id": "1"}, "req_id"),
        ("/v1/completions", {"prompt": [5], "input_ids": [5], "stream": True}, "input_ids"),
    ],
)
def test_fields_of_both_dialects_are_refused_in_the_form_of_openai(client, path, body, mark):
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == mark, answer.text


@pytest.mark.parametrize("text", ["x", "", '"\\\n', "\0", "\u2028\U0001f600", "</script>"])
def test_a_frame_equals_the_whole_piece_with_another_text(text):
    def make(text):
        return encode_event({"id": "a", "choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None})

    frames = Frames()
    for _ in range(2):
        assert frames.encode(0, text, make) == make(text)
    assert json.loads(frames.encode(0, text, make).removeprefix(b"data: "))["choices"][0]["text"] == text


def test_names_that_are_given_replace_the_model_s_own():
    info = SimpleNamespace(name="/models/qwen", folder=None, dtype="bfloat16", kv_cache_dtype="auto", device="cpu")
    engine: Any = SimpleNamespace(info=info, tokenizer=None)
    own = ServedModel(engine, ServerSettings())
    assert own.names == ("qwen",)
    for asked, name in (("qwen", "qwen"), ("/models/qwen", "/models/qwen"), ("default", "qwen"), (None, "qwen")):
        assert own.resolve_name(asked) == name
    given = ServedModel(engine, ServerSettings(served_model_name=("chat", "best")))
    for asked, name in (("chat", "chat"), ("best", "best"), ("default", "chat"), (None, "chat")):
        assert given.resolve_name(asked) == name
    for gone in ("qwen", "/models/qwen"):
        with pytest.raises(ApiError, match=r"There is: chat, best, default\.") as refused:
            given.resolve_name(gone)
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")
