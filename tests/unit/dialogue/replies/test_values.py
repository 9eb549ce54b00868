"""Values that are written as text become what the schema of their parameter says."""

from __future__ import annotations

import json

import pytest

from inferplane.dialogue.replies.values import TypeFinder, convert_value
from tests.unit.dialogue.replies.goldens import NAMED, parse, summarize

SCHEMAS = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"type": ["string", "null"]},
    "optional": {"type": "string", "nullable": True},
    "either": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Name"}]},
    "name": {"$ref": "#/$defs/Name"},
    "choice": {"enum": ["a", 1, None]},
    "any": {},
    "circle": {"$ref": "#/properties/circle"},
    "all": {"allOf": [{"description": "x"}, {"type": "array"}]},
}
SCHEMA = {"properties": SCHEMAS, "$defs": {"Name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5", "5"),
        ("text", " null\n", " null\n"),
        ("number", "5", 5),
        ("number", "5e", "5e"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("maybe", "None", None),
        ("maybe", "true", "true"),
        ("optional", "null", None),
        ("either", "5", 5),
        ("either", "[5]", "[5]"),
        ("name", "5", "5"),
        ("choice", "1", 1),
        ("choice", "a", "a"),
        ("any", '{"a": [1]}', {"a": [1]}),
        ("any", "a b", "a b"),
        ("any", "NaN", "NaN"),
        ("circle", "7", 7),
        ("all", "[1, 2]", [1, 2]),
        ("unknown", "7", 7),
    ],
)
def test_values_are_what_the_schema_says(key, text, value):
    assert json.loads(convert_value(text, TypeFinder(SCHEMA).find(key))) == value
    reply = f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
    (call,) = summarize(parse(NAMED["glm45"], list(reply), {"f": SCHEMA}), "glm45", reply).calls
    assert call == ("f", {key: value})
