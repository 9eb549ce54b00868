"""A hundred JSON schemas and random logits: whatever ends, validates (item 3, bar j)."""

import json

import pytest

pytest.importorskip("llguidance", reason="not run: the extra `constrained` is not installed")

from jsonschema import Draft202012Validator, FormatChecker

from inferplane.engine.request.params import SamplingParams
from tests.unit.support.constrained import grammars, write


def obj(properties, required=None, **more):
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


def arr(items, **more):
    return {"type": "array", "items": items, **more}


TEXT, INT, NUM, BOOL, NULL = ({"type": t} for t in ("string", "integer", "number", "boolean", "null"))
POINT = obj({"x": NUM, "y": NUM})
TREE = {
    "$defs": {
        "node": obj({"value": INT, "left": {"$ref": "#/$defs/node"}, "right": {"$ref": "#/$defs/node"}}, ["value"])
    },
    "$ref": "#/$defs/node",
}
LIST = {
    "$defs": {"list": {"anyOf": [NULL, obj({"head": INT, "tail": {"$ref": "#/$defs/list"}})]}},
    "$ref": "#/$defs/list",
}

SCHEMAS = [
    True,
    {"$schema": "https://json-schema.org/draft/2020-12/schema"},
    *(TEXT, INT, NUM, BOOL, NULL),
    *({"type": "string", "minLength": low, "maxLength": low + 4} for low in range(6)),
    *({"type": "string", "format": f} for f in ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")),
    *(
        {"type": "string", "pattern": p}
        for p in (
            r"^[A-Z]{3}-\d{4}$",
            r"^(a|bc)*d$",
            r"^\+?[0-9]{7,12}$",
            r"^#[0-9a-f]{6}$",
            r"^[^\"]{1,5}$",
            "x",
            "^ab",
        )
    ),
    *({"type": "integer", "minimum": low, "maximum": high} for low, high in ((0, 9), (-5, 5), (10, 99), (99, 1001))),
    *({"type": "integer", "exclusiveMinimum": n, "exclusiveMaximum": n + 3} for n in (-2, 0, 41)),
    *({"type": "number", "minimum": a, "maximum": b} for a, b in ((0, 1), (-1.5, 1.5), (100, 1e4))),
    {"type": "integer", "multipleOf": 5},
    *({"const": c} for c in (1, "é ü", None, True, [1, {"a": "b"}], {"deep": {"er": []}})),
    *(
        {"enum": e}
        for e in (["red", "green", "blue"], [1, "1", None, 2.5], [[], {}], [f"code-{i}" for i in range(300)])
    ),
    *({"type": t} for t in (["string", "null"], ["integer", "boolean", "array"])),
    *(arr(i, minItems=n, maxItems=n + 2) for n, i in enumerate((INT, TEXT, BOOL, POINT, NULL))),
    arr({}, maxItems=3),
    arr(arr(INT, maxItems=3), minItems=1, maxItems=3),
    {"type": "array", "prefixItems": [TEXT, INT, BOOL], "items": False},
    {"type": "array", "prefixItems": [TEXT], "items": INT, "minItems": 2, "maxItems": 4},
    POINT,
    obj({"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 120}}),
    obj({"name": TEXT, "nick": TEXT}, ["name"]),
    obj({"a": INT, "b": INT, "c": INT}, []),
    obj({"tags": arr(TEXT, maxItems=4), "point": POINT}),
    obj({"a": obj({"b": obj({"c": obj({"d": BOOL})})})}),
    obj({'quote"d': INT, "späce key": BOOL, "": NULL}),
    {"type": "object", "additionalProperties": INT, "maxProperties": 3},
    {"type": "object", "additionalProperties": {"anyOf": [INT, TEXT]}, "properties": {"id": INT}, "required": ["id"]},
    {"type": "object", "properties": {"kind": {"const": "x"}}, "required": ["kind", "unnamed"]},
    {"type": "object"},
    *({"anyOf": a} for a in ([INT, TEXT], [POINT, NULL], [obj({"t": {"const": i}, "v": INT}) for i in range(4)])),
    {"allOf": [obj({"a": INT}, additionalProperties=True), {"properties": {"b": TEXT}, "required": ["b"]}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    obj({"value": {"anyOf": [arr(INT, maxItems=2), {"type": "string", "maxLength": 3}]}, "unit": {"enum": ["m", "s"]}}),
    *(TREE, LIST),
    {
        "$defs": {"n": {"type": "string", "maxLength": 6}},
        "type": "array",
        "items": {"$ref": "#/$defs/n"},
        "maxItems": 3,
    },
    {"title": "with notes", "description": "that mean nothing", "default": 3, "examples": [1], **INT},
    *(obj({f"field_{i}": (INT, TEXT, BOOL, NULL)[i % 4] for i in range(n)}) for n in (1, 4, 9, 16)),
    *(obj({f"f{i}": (NUM, BOOL)[i % 2] for i in range(n)}, [f"f{i}" for i in range(0, n, 2)]) for n in (3, 6, 12)),
    *(arr(obj({"id": INT, "role": {"enum": ["user", "tool"]}, "n": n}), minItems=1, maxItems=2) for n in (NUM, BOOL)),
    obj({"city": TEXT, "unit": {"type": ["string", "null"], "enum": ["C", "F", None]}}),
    obj({"email": {"type": "string", "format": "email"}, "born": {"type": "string", "format": "date"}}),
    obj({"matrix": arr(arr(NUM, minItems=2, maxItems=2), minItems=2, maxItems=2)}),
    obj(
        {"price": {"type": "number", "minimum": 0, "exclusiveMaximum": 1000}, "left": {"type": "integer", "minimum": 1}}
    ),
    obj({"steps": arr(obj({"explanation": TEXT, "output": TEXT}), maxItems=2), "answer": TEXT}),
    *({"type": "number", "multipleOf": m, "minimum": 0, "maximum": 100} for m in (0.5, 7)),
    obj({"when": {"type": "string", "format": "date-time"}, "who": {"type": "array", "items": TEXT, "maxItems": 2}}),
    {"anyOf": [{"type": "string", "maxLength": 4}, arr({"anyOf": [BOOL, NULL]}, maxItems=3)]},
    {"$defs": {"p": POINT}, **obj({"from": {"$ref": "#/$defs/p"}, "to": {"$ref": "#/$defs/p"}})},
    obj({"name": {"const": "search"}, "arguments": obj({"query": TEXT, "top": INT}, ["query"])}),
]


# The years of dates begin with 0000, as RFC 3339 has them; Python's calendar begins with 1.
FORMATS = FormatChecker(["email", "ipv4", "uuid"])


def test_a_hundred_schemas():
    assert len(SCHEMAS) == 100 == len({json.dumps(s) for s in SCHEMAS})
    compiled = grammars()
    starts = [compiled.start(SamplingParams(json_schema=s)) for s in SCHEMAS]
    compiled.close()
    texts = write(starts, steps=400)
    unended = [s for s, text in zip(SCHEMAS, texts) if text is None]
    assert len(unended) <= 3, unended
    for schema, text in zip(SCHEMAS, texts):
        if text is not None:
            Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))
