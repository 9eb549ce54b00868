"""Schemas in the words of OpenAPI 3.0 and of draft 3, and what they allow when they constrain a text."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from inferplane.dialogue.schema_dialects import modernize
from inferplane.engine.request.params import SamplingParams

TEXT = {"type": "string"}
COLOR = {"enum": ["red"]}


def allows(schema: dict[str, Any], text: str) -> bool:
    """Whether a constraint of this schema allows a text, byte by byte."""
    constraint = SamplingParams(json_schema=schema).json_schema
    assert constraint is not None
    grammar = llguidance.LLMatcher.grammar_from_json_schema(constraint)
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes(tokens)))
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


class Bytes:
    """A vocabulary of single bytes, as llguidance takes one."""

    eos_token_id, bos_token_id, unk_token_id, special_token_ids = 256, None, None, [256]

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


NULLABLE = [
    {**TEXT, "nullable": True},
    {"type": ["string", "integer"], "nullable": True},
    {**TEXT, **COLOR, "nullable": True},
    {**COLOR, "nullable": True},
    {"allOf": [TEXT], "nullable": True},
    {**TEXT, "const": "red", "nullable": True},
    {"$ref": "#/$defs/color", "nullable": True, "$defs": {"color": COLOR}},
]


@pytest.mark.parametrize("schema", NULLABLE, ids=json.dumps)
def test_null_is_allowed_where_a_schema_says_so(schema):
    assert allows(schema, "null") and allows(schema, '"red"') and not allows(schema, "true")
    assert not allows({**schema, "nullable": False}, "null")
    inside = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    if "$defs" in schema:
        inside = {**inside, "$defs": schema["$defs"]}
    assert allows(inside, '{"a":null}') and allows(inside, '{"a":"red"}')


def test_properties_that_say_themselves_that_they_are_required():
    schema = {"type": "object", "properties": {"a": {**TEXT, "required": True}, "b": {**TEXT, "required": False}}}
    assert allows(schema, '{"a":"x"}') and not allows(schema, "{}") and not allows(schema, '{"b":"x"}')
    both = {**schema, "required": ["b"]}
    assert modernize(both)["required"] == ["b", "a"]
    nullable = {"type": "object", "properties": {"a": {**TEXT, "required": True, "nullable": True}}}
    assert allows(nullable, '{"a":null}') and not allows(nullable, "{}")


def test_other_schemas_stay_as_they_are():
    for schema in (
        {"type": "object", "properties": {"nullable": TEXT, "required": TEXT}, "required": ["nullable"]},
        {"const": {"nullable": True}, "examples": [{"required": True}]},
        {"type": "array", "items": [{"minimum": 1}, True]},
        {"required": True},
    ):
        assert modernize(schema) == schema
        assert json.loads(SamplingParams(json_schema=schema).json_schema or "") == schema
