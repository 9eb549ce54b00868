"""Values of arguments that are not written as JSON: which types a schema allows, and the JSON of a text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

JsonTypes = frozenset[str]
"""Types of JSON schemas."""
MAX_REFS = 16
"""Most references and alternatives inside each other that are followed."""
_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


def quote(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def find_types(schema: Mapping[str, Any], key: str) -> JsonTypes | None:
    """Return the types that a function's schema allows for a parameter; None if it does not say."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return _types_of(found, schema, 0)


def _types_of(schema: Any, root: Mapping[str, Any], depth: int) -> JsonTypes | None:
    if not isinstance(schema, Mapping) or depth > MAX_REFS:
        return None
    if isinstance(schema.get("$ref"), str):
        return _types_of(_resolve(schema["$ref"], root), root, depth + 1)
    null = frozenset(("null",)) if schema.get("nullable") is True else frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,)) | null
    if isinstance(given, list):
        return frozenset(t for t in given if isinstance(t, str)) | null
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_TYPES.get(type(value), "null") for value in values) | null
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            parts = [_types_of(part, root, depth + 1) for part in schema[keyword]]
            known = [part for part in parts if part is not None]
            return frozenset().union(*known) | null if len(known) == len(parts) else None
    if isinstance(schema.get("allOf"), list):
        parts = [_types_of(part, root, depth + 1) for part in schema["allOf"]]
        return next((part for part in parts if part is not None), None)
    return None


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    if not reference.startswith("#"):
        return None
    for part in filter(None, reference[1:].split("/")):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def convert_value(text: str, types: JsonTypes | None) -> str:
    """Return the JSON of a value that is written as text.

    It is what the text says as JSON, if a type allows that, else the text as a string.

    Args:
        text: the value.
        types: allowed types; None: any.
    """
    plain = text.strip()
    plain = _WORDS.get(plain, plain)
    try:
        value = json.loads(plain, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quote(text)
    found = _TYPES.get(type(value), "null")
    if types is None or "string" not in types or found in types or (found == "integer" and "number" in types):
        return plain
    return quote(text)


def _refuse(word: str) -> Any:
    raise ValueError(word)


def convert_python(text: str) -> str:
    """Return the JSON of a number, True, False, None or another word in Python's syntax; the last as a string."""
    plain = _WORDS.get(text, text)
    if plain in ("true", "false", "null") or _NUMBER.fullmatch(plain):
        return plain
    return quote(text)
