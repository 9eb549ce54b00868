"""JSON schemas as they are given: what a constraint cannot enforce, and arguments of calls.

As in OpenAI's API, a schema with `strict` true is enforced or refused, and any other is enforced as far as possible.

Source: https://platform.openai.com/docs/guides/structured-outputs; https://github.com/guidance-ai/llguidance,
docs/json_schema.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inferplane.dialogue.schema_dialects import DATA, NAMES, modernize
from inferplane.errors import UsageError

NOT_ENFORCED = frozenset(
    {
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that llguidance refuses."""
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
"""Formats of strings that are enforced; others are notes, as in the standard."""
BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
MAX_BOUND = 2**62
"""Bounds from this size on are not enforced: llguidance has integers of 64 bits, and no ranges of large floats."""
COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
"""Keywords whose value is a count, which the standard lets be written as 3.0 too."""
_BEYOND_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?(?:[=!]|<[=!])|\\(?:[1-9]|k[<{']))")
"""Look-around and references back, which no automaton follows."""


def relax(schema: Any, dropped: set[str]) -> Any:
    """Return a schema without what cannot be enforced; `oneOf` becomes `anyOf`.

    Args:
        schema: a schema, or a list of schemas.
        dropped: gets the keywords that were removed or changed.
    """
    if isinstance(schema, list):
        return [relax(part, dropped) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NOT_ENFORCED or _is_loose(key, value, schema):
            dropped.add(key)
        elif key in COUNTS and isinstance(value, float) and value.is_integer():
            out[key] = int(value)
        elif key in NAMES and isinstance(value, Mapping):
            enforced = {n: part for n, part in value.items() if key != "patternProperties" or not _is_beyond(n)}
            out[key] = {name: relax(part, dropped) for name, part in enforced.items()}
            if len(enforced) < len(value):
                dropped.add(key)
        else:
            out[key] = value if key in DATA else relax(value, dropped)
    if "patternProperties" in out and len(out["patternProperties"]) < len(schema["patternProperties"]):
        out.pop("additionalProperties", None)  # it would forbid what the removed patterns allow
    if "oneOf" in out:
        dropped.add("oneOf")
        either = {"anyOf": out.pop("oneOf")}
        out.update(either if "anyOf" not in out else {"allOf": [*out.get("allOf", ()), either]})
    return out


def _is_loose(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword is a bound, a pattern or a format that cannot be enforced."""
    if key in BOUNDS:
        return isinstance(value, (int, float)) and abs(value) >= MAX_BOUND
    if not isinstance(value, str):
        return False
    if key == "pattern":
        return _is_beyond(value)
    kinds = schema.get("type", ["string"])
    return key == "format" and value not in FORMATS and "string" in (kinds if isinstance(kinds, list) else [kinds])


def _is_beyond(pattern: str) -> bool:
    return _BEYOND_REGULAR.search(pattern) is not None


def arguments_schema(function: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object; raise UsageError if they cannot be one."""
    if not parameters:
        return {"type": "object", "properties": {}}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        what = f"The parameters of {function} are of type {kind!r}; arguments are of type 'object'."
        raise UsageError(what, remedy='write {"type": "object", "properties": {...}}')
    return {**modernize({**parameters, "nullable": False}), "type": "object"}
