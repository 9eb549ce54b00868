"""References inside of JSON schemas: what they name, and the part of a schema that can stand by itself.

Source: https://json-schema.org/draft/2020-12/json-schema-core, section 8.2; https://datatracker.ietf.org/doc/html/rfc6901.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from inferplane.dialogue.schema_dialects import DATA, NAMES

MAX_REFERENCE = 1024
"""Most characters of a reference that is followed."""
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/]+)")
"""A reference to a definition at the root of a schema."""


def find_referenced(reference: str, root: Any) -> Any:
    """Return the part of a schema that a reference names; None if it names none, is of another document or too long."""
    if len(reference) > MAX_REFERENCE or (reference != "#" and not reference.startswith("#/")):
        return None
    found = root
    for part in reference.split("/")[1:]:
        name = _decode(part)
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and name.isascii() and name.isdigit() and len(name) < 6:
            found = found[int(name)] if int(name) < len(found) else None
        else:
            return None
    return found


def map_refs(schema: Any, rename: Callable[[str], str]) -> Any:
    """Return a copy of a schema with other references.

    Args:
        schema: a schema, or a list of schemas.
        rename: returns what stands in place of a reference.
    """
    if isinstance(schema, list):
        return [map_refs(item, rename) for item in schema]
    # A schema with an id of its own resolves its references by that id, wherever it is.
    if not isinstance(schema, Mapping) or not str(schema.get("$id", "#")).startswith("#"):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            out[key] = rename(value)
        elif key in NAMES and isinstance(value, Mapping):
            out[key] = {name: map_refs(part, rename) for name, part in value.items()}
        else:
            out[key] = value if key in DATA else map_refs(value, rename)
    return out


def rebase_refs(schema: Any, to: str) -> Any:
    """Return a schema for use inside another: its references to itself begin with `to`, a JSON pointer with "#"."""
    return map_refs(schema, lambda ref: to + ref[1:] if ref == "#" or ref.startswith("#/") else ref)


def extract_part(part: Any, root: Mapping[str, Any]) -> Any:
    """Return a part of a schema as a schema of its own, with the definitions that it reaches.

    Where it refers to more than definitions, it gets the whole schema as a definition.

    Args:
        part: a schema somewhere inside of `root`.
        root: what the references are relative to.

    Raises:
        LookupError: a reference names nothing in the schema.
    """
    reached: dict[str, dict[str, Any]] = {}
    waiting = [part]
    while waiting:
        for reference in _list_refs(waiting.pop()):
            target = find_referenced(reference, root)
            if target is None:
                raise LookupError(f"The schema has no part {reference!r}.")
            place = _DEFINITION.fullmatch(reference)
            if place is None:
                return {**rebase_refs(part, "#/$defs/root"), "$defs": {"root": rebase_refs(root, "#/$defs/root")}}
            group, name = reached.setdefault(place[1], {}), _decode(place[2])
            if name not in group:
                group[name] = target
                waiting.append(target)
    return {**part, **reached} if reached else part


def _list_refs(schema: Any) -> list[str]:
    found = dict[str, str]()
    map_refs(schema, lambda ref: found.setdefault(ref, ref))
    return list(found)


def _decode(part: str) -> str:
    """A part of a JSON pointer in a URI as the key that it stands for."""
    return unquote(part).replace("~1", "/").replace("~0", "~")
