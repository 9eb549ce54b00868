"""Values of arguments that are not written as JSON: which types a schema allows, and the JSON of a text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from inferplane.dialogue.schema_refs import find_referenced

JsonTypes = frozenset[str]
"""Types of JSON schemas."""
MAX_DEPTH = 64
"""Most references and alternatives inside each other that are followed."""
MAX_VISITS = 20_000
"""Most schemas that are looked at for the types of one function's parameters; those of others count as not said."""
_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


def quote(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def follow_ref(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the reference at the top of a function's schema names; the schema itself if there is none."""
    found, seen = schema, set[str]()
    while isinstance(reference := found.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        target = find_referenced(reference, schema)
        if not isinstance(target, Mapping):
            break
        found = target
    return found


class TypeFinder:
    """Finds the types of a function's parameters.

    What a reference names is looked at once, so that the time does not grow faster than the schema.

    Args:
        schema: JSON schema of the parameters.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root, self._visits = schema, 0
        properties = follow_ref(schema).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._referenced: dict[int, JsonTypes | None] = {}  # by identity: a reference has many spellings

    def find(self, key: str) -> JsonTypes | None:
        """Return the types that are allowed for a parameter; None if the schema does not say, or not plainly."""
        return self._find(self._properties.get(key), 0)

    def _find(self, schema: Any, depth: int) -> JsonTypes | None:
        self._visits += 1
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or self._visits > MAX_VISITS:
            return None
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = find_referenced(reference, self._root)
            if id(target) not in self._referenced:
                self._referenced[id(target)] = None  # what a reference to itself says
                self._referenced[id(target)] = self._find(target, depth + 1)
            return self._referenced[id(target)]
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
                parts = [self._find(part, depth + 1) for part in schema[keyword]]
                known = [part for part in parts if part is not None]
                return frozenset().union(*known) | null if len(known) == len(parts) else None
        if isinstance(schema.get("allOf"), list):
            parts = [self._find(part, depth + 1) for part in schema["allOf"]]
            return next((part for part in parts if part is not None), None)
        return None


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
