"""Tool calls: what a request's tools demand of the text, and how calls are found in what a model wrote.

A call that must be made (`tool_choice` "required" or a named function) is demanded by a JSON schema, which any model
keeps to. A call that may be made ("auto") is read in the form its family writes it: JSON alone (Llama 3), between
`<tool_call>` tags (Hermes, Qwen), or between DeepSeek's marks.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MAX_CALLS = 16
TAG, TAG_END = "<tool_call>", "</tool_call>"
MARKS, MARK, MARK_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_MARKED = re.compile(rf"{re.escape(MARK)}\s*function{re.escape(MARK_SEP)}([^\n]+)\n```json\n(.*?)\n```", re.DOTALL)
_TAGGED = re.compile(rf"{TAG}\s*(.*?)\s*(?:{TAG_END}|$)", re.DOTALL)
_DATA = frozenset(("const", "enum", "default", "examples"))
"""What in a schema is no schema."""
_NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""What in a schema has schemas by name."""
_BARE = '{"name"'
_BEGUN = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"arguments"\s*:\s*(.*)', re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolPlan:
    """What the tools of a request mean for its text.

    Args:
        mode: "none": no calls; "auto": calls are looked for; "required": the text is a list of calls; "named": the text
            is one function's arguments.
        tools: name -> schema of its parameters.
        named: the function of mode "named".
        parallel: several calls are welcome.
    """

    mode: Literal["none", "auto", "required", "named"] = "none"
    tools: Mapping[str, Mapping[str, Any]] | None = None
    named: str = ""
    parallel: bool = True

    def schema(self) -> dict[str, Any] | None:
        """What the text must fit; None for anything."""
        tools = self.tools or {}
        if self.mode == "named":
            return dict(tools[self.named])
        if self.mode != "required":
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{i}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for i, name in enumerate(tools)
        ]
        schemas = {str(i): _moved(schema, f"#/$defs/{i}") for i, schema in enumerate(tools.values())}
        calls_of = {"items": {"anyOf": calls}, "minItems": 1, "maxItems": self.max_calls}
        return {"type": "array", **calls_of, "$defs": schemas}

    @property
    def max_calls(self) -> int:
        """How many calls an answer may make."""
        return MAX_CALLS if self.parallel else 1


def _moved(schema: Any, to: str) -> Any:
    """A schema as a part of another: what it refers to in itself is found below `to`, a JSON pointer with "#"."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    # One with an id of its own finds its parts itself, wherever it stands.
    if not isinstance(schema, Mapping) or not str(schema.get("$id", "#")).startswith("#"):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            out[key] = to + value[1:]
        elif key in _NAMES and isinstance(value, Mapping):
            out[key] = {name: _moved(part, to) for name, part in value.items()}
        else:
            out[key] = value if key in _DATA else _moved(value, to)
    return out


def new_call_id() -> str:
    """An id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def parse_calls(text: str, known: Collection[str]) -> list[Call] | None:
    """The calls that a text consists of; None when it is no text of calls, or calls something unknown."""
    if MARK in text:
        found = [Call(name.strip(), arguments) for name, arguments in _MARKED.findall(text)]
    elif TAG in text:
        found = [call for inner in _TAGGED.findall(text) if (call := _call_of(_loads(inner)))]
    else:
        data = _loads(text)
        many = data if isinstance(data, list) else [data] if data is not None else _each(text)
        calls = [_call_of(d) for d in many]
        found = [c for c in calls if c is not None] if all(calls) else []
    good = bool(found) and all(c.name in known and isinstance(_loads(c.arguments), dict) for c in found)
    return found if good else None


def parse_truncated_calls(text: str, known: Collection[str]) -> list[Call]:
    """The calls of a list of calls that was cut off, the last one's arguments as far as they came."""
    found, at, decoder = [], text.find("[") + 1, json.JSONDecoder()
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,"))
            data, at = decoder.raw_decode(text, at)
            found += [call for call in [_call_of(data)] if call is not None]
    begun = _BEGUN.match(text, at)
    if begun is not None:
        found.append(Call(begun[1], begun[2]))
    return [call for call in found if call.name in known]


def _each(text: str) -> list[Any]:
    """Objects that stand behind each other, separated by semicolons or line ends."""
    out = []
    for part in re.split(r"[;\n]+", text.strip()):
        if part.strip():
            out.append(_loads(part))
    return out


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call_of(data: Any) -> Call | None:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    return Call(data["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


class ToolReader:
    """Tells content from calls in a text that comes piece by piece.

    Args:
        plan: what to look for.
    """

    def __init__(self, plan: ToolPlan) -> None:
        self._plan = plan
        self._held = ""
        self._calling = plan.mode == "required"
        self._any_content = False
        self._bare = False

    def feed(self, text: str) -> str:
        """Take in text; what of it is content. For mode "named" nothing is: see `named_arguments`."""
        if self._plan.mode == "none":
            return text
        self._held += text
        if self._plan.mode != "auto" or self._calling:
            return ""
        if not self._any_content and self._may_be_bare():
            return ""
        starts = [at for mark in (TAG, MARKS) if (at := self._held.find(mark)) >= 0]
        if starts:
            self._calling = True
            return self._give(min(starts))
        return self._give(len(self._held) - _overlap(self._held, (TAG, MARKS)))

    def end(self) -> tuple[str, list[Call]]:
        """The text is complete: content that was held back, and the calls."""
        held, self._held = self._held, ""
        if not held or self._plan.mode in ("none", "named"):
            return held, []
        calls = parse_calls(held, self._plan.tools or {})
        if calls is None and self._plan.mode == "required":  # cut off: what there is of calls is no content
            return "", parse_truncated_calls(held, self._plan.tools or {})[: self._plan.max_calls]
        return ("", calls[: self._plan.max_calls]) if calls else (held, [])

    def _may_be_bare(self) -> bool:
        if not self._bare:  # once it is one, what follows is not looked at again
            so_far = "".join(self._held.split())
            self._bare = so_far.startswith(_BARE)
            return self._bare or _BARE.startswith(so_far)
        return True

    def _give(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        self._any_content = self._any_content or bool(out)
        return out


def _overlap(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    most = max(map(len, marks)) - 1
    return next((n for n in range(min(most, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in marks)), 0)


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools in words, for models whose chat template does not know of any."""
    listed = "\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools)
    return 'To call one of these functions, answer with JSON alone: {"name": <its name>, "arguments": {...}}\n' + listed
