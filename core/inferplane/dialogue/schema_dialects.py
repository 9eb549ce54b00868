"""JSON schemas in the words of the current standard: OpenAPI 3.0 and draft 3 have others, which have no effect else.

Source: https://spec.openapis.org/oas/v3.0.3, "Schema Object" (nullable);
https://datatracker.ietf.org/doc/html/draft-zyp-json-schema-03, section 5.7 (required).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DATA = frozenset(("const", "enum", "default", "examples"))
"""Keys of a schema whose values are not schemas."""
NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keys of a schema whose values map names to schemas."""
_DEFINITIONS = frozenset(("$schema", "$id", "$anchor", "$defs", "definitions"))
"""Keys that stay where they are: references name their place."""
_COMBINED = frozenset(("const", "$ref", "allOf", "anyOf", "oneOf", "not"))
"""Keys that a null has to pass beside the type."""


def modernize(schema: Any) -> Any:
    """Return a schema whose `nullable: true` is a type or an alternative, and whose properties' `required: true` stands
    in the list of their object.

    Args:
        schema: a schema, or a list of schemas; it stays as it is.
    """
    if isinstance(schema, list):
        return [modernize(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMES and isinstance(value, Mapping):
            parts = map(_without_flag, value.values()) if key == "properties" else value.values()
            out[key] = dict(zip(value, map(modernize, parts)))
        elif key != "nullable":
            out[key] = value if key in DATA else modernize(value)
    if needed := _list_needed(schema):
        listed = out.get("required", [])
        out["required"] = [*listed, *(name for name in needed if name not in listed)]
    return _allow_null(out) if schema.get("nullable") is True else out


def _without_flag(part: Any) -> Any:
    """A property's schema without `required` as draft 3 has it."""
    if isinstance(part, Mapping) and isinstance(part.get("required"), bool):
        return {key: value for key, value in part.items() if key != "required"}
    return part


def _list_needed(schema: Mapping[str, Any]) -> list[str]:
    """The properties that say themselves that they are required; none if `required` is no list already."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not isinstance(schema.get("required", []), list):
        return []
    return [name for name, part in properties.items() if isinstance(part, Mapping) and part.get("required") is True]


def _allow_null(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type")
    if isinstance(kind, (str, list)) and not _COMBINED & schema.keys():
        kinds = [kind] if isinstance(kind, str) else kind
        out = {**schema, "type": kinds if "null" in kinds else [*kinds, "null"]}
        if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
            out["enum"] = [*schema["enum"], None]
        return out
    inner = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
    return {**{key: schema[key] for key in _DEFINITIONS & schema.keys()}, "anyOf": [inner, {"type": "null"}]}
