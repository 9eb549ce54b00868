"""Tool calls: the constraint that a request's tools put on the text, and how calls are found in generated text.

If a call is required (`tool_choice` "required" or a named function), a JSON schema constrains the text, so that every
model makes a valid call. If a call is optional ("auto"), it is parsed in the form of the model's family: plain JSON
(Llama 3), between `<tool_call>` tags (Hermes, Qwen), or between DeepSeek's marks.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from inferplane.serving.constraints.schemas import DATA, NAMES

MAX_CALLS = 16
TAG, TAG_END = "<tool_call>", "</tool_call>"
MARKS, MARK, MARK_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_MARKED = re.compile(rf"{re.escape(MARK)}\s*function{re.escape(MARK_SEP)}([^\n]+)\n```json\n(.*?)\n```", re.DOTALL)
_TAGGED = re.compile(rf"{TAG}\s*(.*?)\s*(?:{TAG_END}|$)", re.DOTALL)
_BARE = '{"name"'
_TRUNCATED = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"arguments"\s*:\s*(.*)', re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolPlan:
    """What the tools of a request mean for its text.

    Args:
        mode: "none": no calls; "auto": the text may contain calls; "required": the text is a list of calls; "named":
            the text is one function's arguments.
        tools: name -> schema of its parameters.
        named: the function of mode "named".
        parallel: an answer may make several calls.
        not_enforced: keywords of the schemas that are not enforced.
    """

    mode: Literal["none", "auto", "required", "named"] = "none"
    tools: Mapping[str, Mapping[str, Any]] | None = None
    named: str = ""
    parallel: bool = True
    not_enforced: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the text; None without a constraint."""
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
        schemas = {str(i): _rebase_refs(schema, f"#/$defs/{i}") for i, schema in enumerate(tools.values())}
        calls_of = {"items": {"anyOf": calls}, "minItems": 1, "maxItems": self.max_calls}
        return {"type": "array", **calls_of, "$defs": schemas}

    @property
    def max_calls(self) -> int:
        """Most calls in an answer."""
        return MAX_CALLS if self.parallel else 1


def _rebase_refs(schema: Any, to: str) -> Any:
    """Return a schema for use inside another: its references to itself begin with `to`, a JSON pointer with "#"."""
    if isinstance(schema, list):
        return [_rebase_refs(item, to) for item in schema]
    # A schema with an id of its own resolves its references by that id, wherever it is.
    if not isinstance(schema, Mapping) or not str(schema.get("$id", "#")).startswith("#"):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            out[key] = to + value[1:]
        elif key in NAMES and isinstance(value, Mapping):
            out[key] = {name: _rebase_refs(part, to) for name, part in value.items()}
        else:
            out[key] = value if key in DATA else _rebase_refs(value, to)
    return out


def new_call_id() -> str:
    """Return an id for a call: nine letters and digits, as Mistral's templates demand when the call comes back."""
    return uuid.uuid4().hex[:9]


def parse_calls(text: str, known: Collection[str]) -> list[Call] | None:
    """Return the calls that a text consists of; None if it is something else, or calls an unknown function."""
    if MARK in text:
        found = [Call(name.strip(), arguments) for name, arguments in _MARKED.findall(text)]
    elif TAG in text:
        found = [call for inner in _TAGGED.findall(text) if (call := _call_of(_loads(inner)))]
    else:
        data = _loads(text)
        items = data if isinstance(data, list) else [data] if data is not None else _parse_objects(text)
        calls = [_call_of(d) for d in items]
        found = [c for c in calls if c is not None] if all(calls) else []
    valid = bool(found) and all(c.name in known and isinstance(_loads(c.arguments), dict) for c in found)
    return found if valid else None


def parse_truncated_calls(text: str, known: Collection[str]) -> list[Call]:
    """Return the calls of a truncated list of calls; the last one has the arguments that were generated."""
    found, at, decoder = [], text.find("[") + 1, json.JSONDecoder()
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,"))
            data, at = decoder.raw_decode(text, at)
            found += [call for call in [_call_of(data)] if call is not None]
    last = _TRUNCATED.match(text, at)
    if last is not None:
        found.append(Call(last[1], last[2]))
    return [call for call in found if call.name in known]


def _parse_objects(text: str) -> list[Any]:
    """Parse JSON objects that are separated by semicolons or line ends."""
    return [_loads(part) for part in re.split(r"[;\n]+", text) if part.strip()]


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
    """Separates content from calls in a text that arrives piece by piece.

    Args:
        plan: which calls to expect.
    """

    def __init__(self, plan: ToolPlan) -> None:
        self._plan = plan
        self._pending = ""
        self._in_calls = plan.mode == "required"
        self._any_content = False
        self._is_bare = False

    def feed(self, text: str) -> str:
        """Add text, and return what of it is content. In mode "named" that is nothing: all text is arguments."""
        if self._plan.mode == "none":
            return text
        self._pending += text
        if self._plan.mode != "auto" or self._in_calls:
            return ""
        if not self._any_content and self._may_be_bare():
            return ""
        starts = [at for mark in (TAG, MARKS) if (at := self._pending.find(mark)) >= 0]
        if starts:
            self._in_calls = True
            return self._release(min(starts))
        return self._release(len(self._pending) - _partial_mark_length(self._pending, (TAG, MARKS)))

    def end(self) -> tuple[str, list[Call]]:
        """End the text, and return the remaining content and the calls."""
        pending, self._pending = self._pending, ""
        if not pending or self._plan.mode in ("none", "named"):
            return pending, []
        calls = parse_calls(pending, self._plan.tools or {})
        if calls is None and self._plan.mode == "required":  # truncated: incomplete calls are not content
            return "", parse_truncated_calls(pending, self._plan.tools or {})[: self._plan.max_calls]
        return ("", calls[: self._plan.max_calls]) if calls else (pending, [])

    def _may_be_bare(self) -> bool:
        if not self._is_bare:  # once it is one, later text is not checked again
            so_far = "".join(self._pending.split())
            self._is_bare = so_far.startswith(_BARE)
            return self._is_bare or _BARE.startswith(so_far)
        return True

    def _release(self, count: int) -> str:
        out, self._pending = self._pending[:count], self._pending[count:]
        self._any_content = self._any_content or bool(out)
        return out


def _partial_mark_length(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of a text may begin a mark."""
    longest = max(map(len, marks)) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in marks)), 0)


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Describe tools in text, for models whose chat template does not support tools."""
    listed = "\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools)
    return 'To call one of these functions, answer with JSON alone: {"name": <its name>, "arguments": {...}}\n' + listed
