"""The arguments of a function one by one, for forms in which they do not stand as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from inferplane.dialogue.replies.values import follow_ref

_COMBINED = frozenset(
    {
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "const", "enum"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
        *("dependencies", "dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that say of an object more than which properties it has."""


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
