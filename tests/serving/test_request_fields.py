"""Fields that a format does not have, and numbers that no step can hold: refused, or named in the answer."""

from __future__ import annotations

import json
import math
import re
import time
from typing import Any, get_args

import h11
import pytest

from inferplane.engine import SamplingParams
from inferplane.serving import native
from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.errors import ApiError
from inferplane.serving.http.completions import CompletionRequest
from inferplane.serving.http.embeddings import EmbeddingRequest
from inferplane.serving.http.responses import report_ignored_fields
from inferplane.serving.kserve.requests import TypedRequest
from inferplane.serving.request_fields import IGNORED, REFUSED
from inferplane.serving.wire import unknown_fields, validate
from tests.serving.live import Live

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "completions": (CompletionRequest, {"prompt": "x"}),
    "chat": (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    "native": (native.NativeRequest, {"text": "x"}),
    "typed": (TypedRequest, {"text_input": "x"}),
}


def refusal(model: Any, data: dict[str, Any]) -> ApiError | None:
    try:
        validate(model, data)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("form", MODELS)
def test_a_field_of_another_server_that_changes_the_answer_is_refused(form):
    model, body = MODELS[form]
    for name, field in {**REFUSED, **model.refused}.items():
        if name in model.model_fields:
            continue
        error = refusal(model, {**body, name: "surely another value"})
        assert error is not None and (error.status, error.param) == (400, name), name
        assert field.instead in error.message
        for neutral in (None, *field.neutral):
            request = validate(model, {**body, name: neutral})
            assert name not in unknown_fields(request) or neutral is None
    for name in IGNORED:
        if name not in model.model_fields:
            assert unknown_fields(validate(model, {**body, name: "x"})) == [name]


@pytest.mark.parametrize(
    ("form", "name", "value", "instead"),
    [
        ("chat", "suppress_tokens", [3], "logit_bias"),
        ("chat", "bad_words_ids", [[1]], "logit_bias"),
        ("chat", "force_words_ids", [[3]], "regex or grammar"),
        ("chat", "forced_bos_token_id", 3, ""),
        ("chat", "eos_token_id", 3, "stop_token_ids"),
        ("chat", "stop_token", 3, "stop"),
        ("chat", "max_length", 5, "max_tokens"),
        ("chat", "num_return_sequences", 2, "n"),
        ("chat", "guidance_scale", 3.0, ""),
        ("chat", "penalty_alpha", 0.6, ""),
        ("native", "bad_token_ids", [3], "OpenAI's dialect"),
        ("native", "history_ask", ["x"], "messages"),
        ("native", "eos_token_id", 3, "eos_token_ids"),
        ("native", "stop_words", ["x"], "stop_sequences"),
    ],
)
def test_fields_of_transformers_are_refused_with_what_to_use(form, name, value, instead):
    model, body = MODELS[form]
    error = refusal(model, {**body, name: value})
    assert error is not None and (error.status, error.param, error.code) == (400, name, "unsupported")
    assert error.message == (f"{name}: Not supported: use {instead}." if instead else f"{name}: Not supported.")


@pytest.mark.parametrize(
    ("form", "name", "value", "instead"),
    [
        ("chat", "think", False, "enable_thinking or reasoning_effort"),
        ("chat", "think", "high", "enable_thinking or reasoning_effort"),
        ("chat", "format", "json", "response_format"),
        ("completions", "format", {"type": "object"}, "response_format"),
        ("native", "format", "json", "OpenAI's dialect"),
        ("chat", "reasoning", {"effort": "low"}, "reasoning_effort"),
        ("chat", "repeat_penalty", 1.1, "repetition_penalty"),
        ("native", "repeat_penalty", 1.1, "penalty_score"),
    ],
)
def test_fields_of_ollama_llama_cpp_and_openrouter_are_refused_with_what_to_use(form, name, value, instead):
    model, body = MODELS[form]
    error = refusal(model, {**body, name: value})
    assert error is not None and (error.status, error.param, error.code) == (400, name, "unsupported")
    assert f"use {instead}" in error.message


@pytest.mark.parametrize(
    ("fields", "param", "kinds"),
    [
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "'function', 'custom'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}, {}]}, "tools[1].type", "'function', 'custom'"),
        ({"response_format": {}}, "response_format.type", "'text', 'json_object', 'json_schema'"),
        ({"response_format": {"type": None}}, "response_format.type", "'text', 'json_object', 'json_schema'"),
    ],
)
def test_an_object_without_its_type_is_answered_with_the_types_that_there_are(fields, param, kinds):
    model, body = MODELS["chat"]
    error = refusal(model, {**body, **fields})
    assert error is not None
    assert (error.param, error.code) == (param, "missing_required_parameter")
    assert error.message == f"{param}: it is required: one of {kinds}."


@pytest.mark.parametrize(
    ("fields", "param", "kinds"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function', 'custom'"),
        ({"response_format": {"type": "json"}}, "response_format.type", "'text', 'json_object', 'json_schema'"),
    ],
)
def test_an_object_of_an_unknown_type_is_answered_with_the_types_that_there_are(fields, param, kinds):
    model, body = MODELS["chat"]
    error = refusal(model, {**body, **fields})
    assert error is not None and (error.param, error.code) == (param, "invalid_value")
    assert error.message == f"{param}: it is none of these: {kinds}."


@pytest.mark.parametrize("kind", ["integer", "array", ["string", "null"], 5])
def test_a_json_object_of_another_type_is_refused(kind):
    model, body = MODELS["chat"]
    request = validate(model, {**body, "response_format": {"type": "json_object", "schema": {"type": kind}}})
    with pytest.raises(ApiError, match="json_object is for objects") as caught:
        request.constraint()
    assert (caught.value.status, caught.value.param) == (400, "response_format.schema")
    fits = {"type": "json_object", "schema": {**SCHEMA, "type": ["object", "null"]}}
    (schema,) = validate(model, {**body, "response_format": fits}).constraint()[0].values()
    assert schema == SCHEMA


@pytest.mark.parametrize(
    ("form", "name", "meant"),
    [
        ("completions", "temprature", "temperature"),
        ("completions", "tempreature", "temperature"),
        ("completions", "max_token", "max_tokens"),
        ("completions", "topp_p", "top_p"),
        ("completions", "Temperature", "temperature"),
        ("completions", "sead", "seed"),
        ("chat", "maxTokens", "max_tokens"),
        ("chat", "max_completion_token", "max_completion_tokens"),
        ("chat", "tool", "tools"),
        ("chat", "responseformat", "response_format"),
        ("chat", "chat_template_kwarg", "chat_template_kwargs"),
        ("chat", "guided_jsom", "guided_json"),
        ("chat", "frequency_penalti", "frequency_penalty"),
        ("native", "max_dec_leng", "max_dec_len"),
        ("native", "top_p_", "top_p"),
        ("typed", "ignore_eso", "ignore_eos"),
        ("completions", "topP", "top_p"),
        ("completions", "topK", "top_k"),
        ("completions", "minP", "min_p"),
        ("completions", "top-k", "top_k"),
        ("completions", "N", "n"),
        ("completions", "frequencyPenalty", "frequency_penalty"),
        ("completions", "STOP_TOKEN_IDS", "stop_token_ids"),
        ("chat", "toolChoice", "tool_choice"),
    ],
)
def test_a_mistyped_field_is_refused_with_the_one_that_was_meant(form, name, meant):
    model, body = MODELS[form]
    error = refusal(model, {**body, name: 1})
    assert error is not None and error.param == name and f"Perhaps {meant} was meant" in error.message
    assert refusal(model, {**body, name: None}) is None, "null changes nothing"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "x", "schema": SCHEMA}
GET = {"name": "get", "parameters": SCHEMA}
TOOL = {"type": "function", "function": GET}


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("tools", [{**TOOL, "function": {"name": "get", "paramters": SCHEMA}}], "tools[0].function.paramters"),
        ("tools", [TOOL, {**TOOL, "function": {**GET, "Strict": True}}], "tools[1].function.Strict"),
        ("tools", [{**TOOL, "function": {"name": "get", "input_schema": SCHEMA}}], "tools[0].function.input_schema"),
        ("tools", [{**TOOL, "functon": GET}], "tools[0].functon"),
        ("tools", [{**TOOL, "parameters": SCHEMA}], "tools[0].parameters"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "shema": {}}}, "json_schema.shema"),
        ("response_format", {"type": "json_schema", "json_schema": {**NAMED, "stict": True}}, "json_schema.stict"),
        ("response_format", {"type": "json_schema", "json_schema": NAMED, "schema": SCHEMA}, "schema"),
        ("response_format", {"type": "json_object", "shema": SCHEMA}, "shema"),
        ("response_format", {"type": "json_object", "json_schema": NAMED}, "json_schema"),
        ("response_format", {"type": "text", "schema": SCHEMA}, "schema"),
        ("response_format", {"type": "text", "json_schema": NAMED}, "json_schema"),
        ("response_format", {"type": "text", "jsonSchema": NAMED}, "jsonSchema"),
        ("stream_options", {"include_usge": True}, "include_usge"),
        ("stream_options", {"includeUsage": True}, "includeUsage"),
    ],
)
def test_a_mistyped_or_misplaced_field_of_an_object_is_refused_with_its_path(field, value, path):
    model, body = MODELS["chat"]
    error = refusal(model, {**body, "stream": True, field: value})
    whole = path if path.startswith(field) else f"{field}.{path}"
    assert error is not None and (error.status, error.param) == (400, whole) and whole in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{**TOOL, "cache_control": {"type": "ephemeral"}}]),
        ("tools", [{**TOOL, "function": {**GET, "returns": {"type": "string"}}}]),
        ("response_format", {"type": "json_object", "schema": SCHEMA}),
        ("response_format", {"type": "json_schema", "json_schema": NAMED, "schema": None}),
        ("stream_options", {"include_usage": True, "include_obfuscation": False}),
        ("tool_choice", {"type": "function", "function": {"name": "get", "made_up": 1}}),
    ],
)
def test_other_fields_of_an_object_are_accepted(field, value):
    model, body = MODELS["chat"]
    assert refusal(model, {**body, "stream": True, field: value}) is None


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("embed_dtype", "float16", "float32"),
        ("embed_dtype", "int8", None),
        ("endianness", "big", "native"),
        ("endianness", "network", "little"),
        ("use_activation", False, True),
    ],
)
def test_embeddings_of_another_form_are_refused(name, value, neutral):
    error = refusal(EmbeddingRequest, {"input": "x", name: value})
    assert error is not None and (error.status, error.param) == (400, name)
    assert refusal(EmbeddingRequest, {"input": "x", name: neutral}) is None


@pytest.mark.parametrize("name", ["wings", "x", "id", "m", "trace_id", "frobnicate", "my_own_field", "é"])
def test_other_unknown_fields_are_no_typos(name):
    for model, body in MODELS.values():
        assert unknown_fields(validate(model, {**body, name: 1})) == [name]


def test_unknown_fields_cost_little_time():
    begun = time.process_time()
    error = refusal(CompletionRequest, {"prompt": "x", **{f"field_{i}" * 3: 1 for i in range(100_000)}})
    assert error is not None and error.code == "too_many"
    refusal(CompletionRequest, {"prompt": "x", **{f"field_{i}": 1 for i in range(64)}, "y" * 10**6: 1})
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    "names",
    [
        [" a"],
        ["a "],
        ["", "b"],
        ['"', "\\", ", ", "a, b"],
        ["evil\r\nx: 1", "\x7f", "\x00", "\t"],
        ["é", "日本", "\U0001f600"],
        ["a" * 1000],
        [f"name_{i}" for i in range(100)],
        ["metadata", "x-y.z"],
    ],
)
def test_the_header_with_ignored_names_is_valid_and_names_are_whole(names):
    (value,) = report_ignored_fields(names).values()
    assert re.fullmatch(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?", value) and len(value) < 450
    h11.Response(status_code=200, headers=[("x-inferplane-ignored", value)])
    parts = re.findall(r'"(?:[^"\\]|\\.)*"|and [0-9]+ more|[^", ]+', value)
    assert ", ".join(parts) == value
    shown = [json.loads(p) if p.startswith('"') else p for p in parts if not p.startswith("and ")]
    assert shown == names[: len(shown)]
    left = len(names) - len(shown)
    assert parts[len(shown) :] == ([f"and {left} more"] if left else [])
    assert report_ignored_fields([]) == {}


def numeric_fields(model: Any) -> list[str]:
    def takes_number(annotation: Any) -> bool:
        return annotation in (int, float) or any(map(takes_number, get_args(annotation)))

    return [name for name, field in model.model_fields.items() if takes_number(field.annotation)]


@pytest.mark.parametrize("form", MODELS)
def test_numbers_that_a_step_cannot_hold_are_refused_at_every_door(form):
    """Whatever a format accepts, `SamplingParams` accepts too; see its own tests for what a step can hold."""
    model, body = MODELS[form]
    names = numeric_fields(model)
    assert len(names) >= 10
    for name in names:
        for value in (2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e300, -1e300, 1e-300, 5e-324, math.nan, math.inf):
            for shape in (value, [value], {"1": value}):
                error = refusal(model, {**body, name: shape})
                if error is not None:
                    assert str(error.param).startswith(name), (name, shape, error)
                    continue
                request = validate(model, {**body, name: shape})
                assert name == "timeout" or abs(value) <= 2**63 or isinstance(value, float), (name, value)
                made = native._sampling(request) if form == "native" else request.sampling_fields()
                SamplingParams(**{k: v for k, v in made.items() if k != "min_tokens"})


BODY = {"prompt": "x", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.mark.parametrize("name", [" a", "a ", '"', "a, b", "\x7f", "é", "metadata", "n" * 5000])
def test_a_request_with_any_name_is_answered(client, name):
    answer = client.post("/v1/completions", json={**BODY, name: 1})
    assert answer.status_code == 200, answer.text
    answer = client.post("/v1/completions", json={**BODY, name: 1, "stream": True})
    assert answer.status_code == 200 and "[DONE]" in answer.text
    assert client.post("/detokenize", json={"tokens": [5], name: 1}).status_code == 200


def test_ignored_fields_are_counted_by_known_names(server, client):
    counted = 'inferplane:ignored_fields_total{field="%s"}'
    before = server.metrics()
    client.post("/v1/completions", json={**BODY, "metadata": {}, "made_up_a": 1, "made_up_b": 2})
    client.post("/v1/chat/completions", json={**CHAT, "store": True})
    after = server.metrics()
    for name, count in (("metadata", 1), ("store", 1), ("other", 2)):
        assert after[counted % name] - before.get(counted % name, 0) == count


def test_a_strict_server_refuses_every_field_without_effect():
    with Live("--strict-fields") as server, server.client() as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"text": "x", "max_dec_len": 1}),
            ("/v1/embeddings", {"input": "x"}),
            ("/tokenize", {"prompt": "x"}),
        ):
            for name in ("metadata", "made_up"):
                answer = client.post(path, json={**body, name: 1})
                assert answer.status_code == 400, (path, name, answer.text)
                assert name in answer.text
        for path, body in (("/v1/chat/completions", CHAT), ("/tokenize", {"messages": CHAT["messages"]})):
            answer = client.post(path, json={**body, "messages": [{"role": "user", "content": "x", "mood": "good"}]})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].mood"
