"""Schemas as agents send them: enforced as far as possible, or with `strict` refused; arguments are objects."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import llguidance
import pytest

from inferplane.dialogue.schema_limits import FORMATS, NOT_ENFORCED, arguments_schema, relax
from inferplane.engine.sampling.grammars import JSON_OPTIONS
from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.chat.tools import plan_tools
from inferplane.serving.errors import ApiError
from inferplane.serving.wire import validate

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""The pattern that pydantic writes for `Decimal`."""
TEXT = {"type": "string"}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "large integers": (obj(a={"type": "integer", "minimum": 2**63}, b={"type": "integer", "maximum": 9}), ["minimum"]),
    "huge integers": (obj(a={"type": "integer", "exclusiveMinimum": 2**70}), ["exclusiveMinimum"]),
    "float ranges": (obj(a={"type": "number", "minimum": -1e300, "maximum": 1e300}), ["maximum", "minimum"]),
    "uniqueItems": (
        obj(tags={"type": "array", "items": {"enum": ["a"]}, "maxItems": 2, "uniqueItems": True}),
        ["uniqueItems"],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "maxProperties": 1},
        ["propertyNames"],
    ),
    "not": (obj(a={"enum": [1, 2], "not": {"const": 3}}), ["not"]),
    "contains": (
        obj(a={"type": "array", "maxItems": 2, "contains": {"const": 1}, "minContains": 1}),
        ["contains", "minContains"],
    ),
    "if": ({**obj(a={"enum": [1]}), "if": {"required": ["a"]}, "then": {}, "else": {}}, ["else", "if", "then"]),
    "an unknown format": (obj(a={"type": "string", "format": "phone", "maxLength": 3}), ["format"]),
    "a binary format": (obj(a={"type": ["string", "null"], "format": "binary", "maxLength": 3}), ["format"]),
    "look-around": (
        obj(price={"anyOf": [{"enum": [1]}, {"type": "string", "maxLength": 3, "pattern": DECIMAL}]}),
        ["pattern"],
    ),
    "look-behind": (obj(a={"type": "string", "maxLength": 3, "pattern": "(?<=a)b"}), ["pattern"]),
    "a reference back": (obj(a={"type": "string", "maxLength": 3, "pattern": r"(.)\1"}), ["pattern"]),
    "names with look-around": (
        {"type": "object", "patternProperties": {"^(?!x)": TEXT}, "additionalProperties": False, "maxProperties": 1},
        ["patternProperties"],
    ),
    "oneOf": (obj(a={"oneOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"enum": [1, 2.5]}]}), ["oneOf"]),
    "oneOf beside anyOf": (obj(a={"anyOf": [{"enum": [1, 2]}], "oneOf": [{"enum": [2, 3]}, {"enum": [2]}]}), ["oneOf"]),
    "dependent fields": ({**obj(a={"enum": [1]}), "dependentRequired": {"a": ["a"]}}, ["dependentRequired"]),
    "unevaluated fields": ({**obj(a={"enum": [1]}), "unevaluatedProperties": False}, ["unevaluatedProperties"]),
    "in definitions": (
        {**obj(a={"$ref": "#/$defs/A"}), "$defs": {"A": {"enum": ["x"], "not": {}}}},
        ["not"],
    ),
}


def is_compiled(schema: Any) -> bool:
    make = llguidance.LLMatcher
    return not make.validate_grammar(make.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS))


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_cannot_be_enforced_is_left_out_and_named(name):
    schema, left_out = SCHEMAS[name]
    dropped: set[str] = set()
    relaxed = relax(schema, dropped)
    assert sorted(dropped) == left_out
    assert is_compiled(relaxed) and not is_compiled(schema)
    jsonschema.Draft202012Validator.check_schema(relaxed)
    assert relax(relaxed, set()) == relaxed


def test_counts_may_be_written_as_floats():
    dropped: set[str] = set()
    relaxed = relax(obj(a={"type": "string", "maxLength": 3.0}), dropped)
    assert relaxed == obj(a={"type": "string", "maxLength": 3}) and not dropped and is_compiled(relaxed)
    assert type(relaxed["properties"]["a"]["maxLength"]) is int


def test_the_tables_are_those_of_the_library():
    """Every keyword and every format that is left out is one that llguidance refuses, and no other."""
    values: dict[str, Any] = {"dependentRequired": {}, "dependencies": {}, "dependentSchemas": {}, "$dynamicRef": "#a"}
    for keyword in NOT_ENFORCED:
        assert not is_compiled({"type": "object", keyword: values.get(keyword, {})}), keyword
    for form in FORMATS:
        assert is_compiled({"type": "string", "format": form}), form
    for form in ("iri", "regex", "byte", "password", "json-pointer", "uri-reference", "idn-email"):
        assert not is_compiled({"type": "string", "format": form}), form


@pytest.mark.parametrize(
    "schema",
    [
        obj(pattern=TEXT, format=TEXT, **{"not": TEXT, "oneOf": TEXT, "uniqueItems": {"enum": [True]}}),
        obj(a={"const": {"not": 1, "oneOf": [1], "pattern": "(?=a)"}}),
        obj(a={"enum": [{"uniqueItems": True}]}),
        obj(a={"type": "string", "pattern": r"^\(\?=[0-9]\\1$"}, b={"type": "string", "format": "date"}),
        obj(a={"type": "integer", "format": "int32"}),
        {"$ref": "#/$defs/not", "$defs": {"not": TEXT}},
    ],
)
def test_names_and_data_are_no_keywords(schema):
    dropped: set[str] = set()
    assert relax(schema, dropped) == schema and not dropped


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        ({"properties": {"a": TEXT}, "required": ["a"]}, "object"),
        ({"anyOf": [obj(a=TEXT), {"type": "null"}]}, "object"),
        ({"type": ["object", "null"]}, "object"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [obj(a=TEXT), {"type": "integer"}]}}}, "object"),
        ({"description": "nothing"}, "object"),
        ({}, "object"),
        (None, "object"),
    ],
)
def test_arguments_of_a_call_are_an_object(parameters, kind):
    schema = arguments_schema("f", parameters)
    assert schema["type"] == kind and is_compiled(schema)
    check = jsonschema.Draft202012Validator(schema)
    assert not any(check.is_valid(value) for value in (-4, "x", None, [], True))


@pytest.mark.parametrize("kind", ["string", "array", ["integer", "null"], 5])
def test_parameters_of_another_type_are_refused(kind):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}
    request = validate(ChatRequest, {"messages": [{"role": "user", "content": "x"}], "tools": [tool]})
    with pytest.raises(ApiError, match="type 'object'") as refused:
        plan_tools(request)
    assert (refused.value.status, refused.value.param) == (400, "tools")


# ---------------------------------------------------------------- on a server

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "temperature": 0, "seed": 1}


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_enforced_as_far_as_possible_or_refused(client, name):
    schema, left_out = SCHEMAS[name]
    for form in (named(schema), named(schema, strict=False), {"type": "json_object", "schema": schema}):
        answer = client.post("/v1/chat/completions", json={**CHAT, "response_format": form})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), relax(schema, set()))
        assert answer.headers["x-inferplane-ignored"] == ", ".join(f"response_format.{k}" for k in left_out)
    answer = client.post("/v1/chat/completions", json={**CHAT, "response_format": named(schema, strict=True)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


def test_an_object_with_a_schema_fits_it(client):
    schema = obj(color={"enum": ["red", "green"]})
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x", "max_tokens": 99})):
        answer = client.post(path, json={**body, "response_format": {"type": "json_object", "schema": schema}})
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"] if "chat" in path else choice["text"]
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize(
    "parameters", [{"properties": {"a": {"enum": [1]}}}, {"anyOf": [{"enum": [-4]}, obj(a={"enum": [1]})]}, {}]
)
def test_a_demanded_call_has_an_object_for_arguments(client, choice, parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    wanted: Any = "required" if choice == "required" else {"type": "function", "function": {"name": "f"}}
    body = {**CHAT, "tools": [tool], "tool_choice": wanted, "logit_bias": {"1": 5}}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]
    if found["finish_reason"] != "length":
        assert isinstance(json.loads(found["message"]["tool_calls"][0]["function"]["arguments"]), dict)
    else:
        assert found["message"]["tool_calls"][0]["function"]["arguments"].lstrip()[:1] in ("{", "")


def test_tools_that_are_strict_are_refused_where_others_are_relaxed(client):
    schema, left_out = SCHEMAS["look-around"]
    for strict, status in ((None, 200), (False, 200), (True, 400)):
        function = {"name": "f", "parameters": schema, "strict": strict}
        body = {**CHAT, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == status, answer.text
        if status == 200:
            assert answer.headers["x-inferplane-ignored"] == f"tools.{left_out[0]}"
        else:
            assert answer.json()["error"]["param"] == "tools"


@pytest.mark.parametrize("text", ["<think>", "<|eos|>", "</s>", "<|bos|><|pad|>", "<tool_call>"])
def test_text_that_looks_like_a_token_is_written(client, text):
    for form, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x", "max_tokens": 99})):
        answer = client.post(form, json={**body, "response_format": named({"enum": [text]})})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert json.loads(choice["message"]["content"] if "chat" in form else choice["text"]) == text
