"""The arguments of a function one by one, for forms in which they do not stand as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from inferplane.dialogue.replies.values import follow_ref
from inferplane.dialogue.schema_refs import find_referenced

_COMBINED = frozenset(
    {
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "const", "enum"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
        *("dependencies", "dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that say of an object more than which properties it has."""

_NOTES = frozenset(
    {
        *("type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable"),
        *("$comment", "$id", "$schema", "$anchor", "$defs", "definitions", "$ref", "anyOf", "oneOf", "allOf"),
    }
)
"""Keywords that do not limit the texts that a schema allows, beside those that are followed."""
MAX_HOPS = 8
"""Most references to references that are followed to the choices of an argument."""


class NotInForm(Exception):
    """A schema's arguments cannot be demanded one by one."""


class Argument(NamedTuple):
    """One argument: its name, its schema, and whether a call has it always."""

    name: str
    schema: Any
    is_required: bool


def list_arguments(schema: Mapping[str, Any]) -> list[Argument]:
    """Return the arguments of a function in the order of its schema, whose top may be a reference.

    Raises:
        NotInForm: the schema allows others too, or says more than which there are.
    """
    own = follow_ref(schema)
    beside = {key: value for key, value in schema.items() if key != "$ref"} if own is not schema else {}
    if "$ref" in own or any(key in beside for key in ("properties", "required")):
        raise NotInForm("The arguments are behind a reference, and beside it.")
    for part in (own, beside):
        extra = part.get("additionalProperties", False)
        if isinstance(extra, Mapping) or extra is True or any(key in part for key in _COMBINED):
            raise NotInForm("The arguments are not only a list of properties.")
    properties, required = own.get("properties"), own.get("required")
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set[str]()
    if not isinstance(properties, Mapping):
        if own.get("additionalProperties") is not False:
            raise NotInForm("The arguments have no list.")
        properties = {}
    allowed = {name: part for name, part in properties.items() if part is not False}
    if not needed <= allowed.keys():
        raise NotInForm("An argument that is required has no schema.")
    return [Argument(name, part, name in needed) for name, part in allowed.items()]


def list_choices(part: Any, root: Mapping[str, Any]) -> list[str | None] | None:
    """Return the texts that an argument may be, and None for null; None if it is not a choice of these.

    Args:
        part: schema of the argument.
        root: schema of the function.
    """
    part = _follow(part, root)
    either = next((part[key] for key in ("anyOf", "oneOf") if isinstance(part.get(key), list)), [part])
    found: list[str | None] = []
    for one in either:
        schema = _follow(one, root)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        values = [None] if schema.get("type") == "null" else values
        if not isinstance(values, list) or not all(value is None or isinstance(value, str) for value in values):
            return None
        found += values
    return found if any(found) else None


def _follow(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the reference at the top of a schema names; an empty schema if that is none."""
    for _ in range(MAX_HOPS):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        schema = find_referenced(schema["$ref"], root)
    return schema if isinstance(schema, Mapping) else {}


def list_limits(part: Any, root: Mapping[str, Any], followed: set[int]) -> set[str]:
    """Return the keywords by which a schema limits what its types allow.

    Args:
        part: a schema.
        root: what its references are relative to.
        followed: identities of what references name that were followed already; gets those that are.
    """
    found, waiting = set[str](), [part]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        found |= schema.keys() - _NOTES
        reference = schema.get("$ref")
        target = find_referenced(reference, root) if isinstance(reference, str) else None
        if target is not None and id(target) not in followed:
            followed.add(id(target))
            waiting.append(target)
        for key in ("anyOf", "oneOf", "allOf"):
            waiting += schema[key] if isinstance(schema.get(key), list) else []
    return found
