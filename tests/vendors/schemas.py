"""Vendors' schemas as this repository restates them: one small file a vendor, and what has changed since, in words.

A file has comment lines first, `# source: ...` and `# version: ...` among them, then one schema a line as a dispatcher
prints it, `namespace::name.overload(arguments) -> results`. A comment `# kind: ...` says of the schemas below it what
they are: what a dispatcher said, a published definition, a call form. A Python function of a module `a.b` is written as
an operator of the namespace `a__b`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TORCH = "aten"
"""torch's own namespace."""
NO_DEFAULT = "no default"
DISPATCHER = "as a dispatcher states it"


@dataclass(frozen=True)
class Restated:
    """The schemas of one file.

    Args:
        source: where they come from.
        version: of what they were taken from.
        schemas: by `namespace::name.overload`; "" is the usual overload.
        kinds: what each of them is.
    """

    source: str
    version: str
    schemas: dict[str, Any]
    kinds: dict[str, str] = field(default_factory=dict)


def read(path: Path) -> Restated:
    """The schemas in a file.

    Raises:
        ValueError: a line is no schema, an operator stands there twice, or source or version is not stated.
    """
    head, schemas, kinds, kind = {}, {}, {}, DISPATCHER
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#"):
            key, colon, value = line.lstrip("# ").partition(": ")
            if colon and key == "kind":
                kind = value
            elif colon:
                head.setdefault(key, value)
        elif line.strip():
            try:
                schema = torch._C.parse_schema(line)
            except RuntimeError as error:
                raise ValueError(f"{path.name}:{number}: not a schema: {error}") from error
            name = full_name(schema)
            if name in schemas:
                raise ValueError(f"{path.name}:{number}: {name} stands there twice")
            schemas[name], kinds[name] = schema, kind
    missing = {"source", "version"} - set(head)
    if missing:
        raise ValueError(f"{path.name} does not state its {' and '.join(sorted(missing))}")
    return Restated(head["source"], head["version"], schemas, kinds)


def full_name(schema: Any) -> str:
    """`namespace::name`, with its overload behind a dot where it has one."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def registered(name: str) -> Any | None:
    """The schema that this process's dispatcher has under a full name; None when there is none."""
    operator, _, overload = name.partition(".")
    try:
        return torch._C._get_schema(operator, overload)
    except RuntimeError:
        return None


def differences(restated: Any, found: Any | None) -> list[str]:
    """What differs between a schema as restated and as found, a line each; empty when nothing does."""
    name = full_name(restated)
    if found is None:
        return [f"{name}: is gone"]
    old = {a.name: (i, a) for i, a in enumerate(restated.arguments)}
    new = {a.name: (i, a) for i, a in enumerate(found.arguments)}
    out = [f"{name}: argument {a!r} is gone" for a in old if a not in new]
    out += [f"{name}: argument {_describe(new[a][1])} is new, at place {new[a][0]}" for a in new if a not in old]
    # Places are compared among the arguments that both have: a new one moves those behind it, and is reported once.
    common_old, common_new = [a for a in old if a in new], [a for a in new if a in old]
    for argument in common_old:
        (_, was), (_, now) = old[argument], new[argument]
        if common_old.index(argument) != common_new.index(argument):
            out.append(f"{name}: argument {argument!r} has moved from place {old[argument][0]} to {new[argument][0]}")
        if was.kwarg_only != now.kwarg_only:
            out.append(f"{name}: argument {argument!r} is {'' if now.kwarg_only else 'no longer '}a keyword only")
        if _type(was) != _type(now):
            out.append(f"{name}: argument {argument!r} is {_type(now)}, it was {_type(was)}")
        if _default(was) != _default(now):
            out.append(f"{name}: argument {argument!r} has default {_default(now)}, it had {_default(was)}")
    was_returned, now_returned = ([_type(r) for r in s.returns] for s in (restated, found))
    if was_returned != now_returned:
        out.append(f"{name}: returns ({', '.join(now_returned)}), it returned ({', '.join(was_returned)})")
    return out


def _type(argument: Any) -> str:
    alias = argument.alias_info
    return f"{argument.real_type}{' (written to)' if alias is not None and alias.is_write else ''}"


def _default(argument: Any) -> str:
    return repr(argument.default_value) if argument.has_default_value() else NO_DEFAULT


def _describe(argument: Any) -> str:
    default = _default(argument)
    return f"{_type(argument)} {argument.name}" + ("" if default == NO_DEFAULT else f"={default}")
