"""The tools of a request: what `tool_choice` allows and demands, and the constraint for calls in generic JSON.

Sources: https://platform.openai.com/docs/api-reference/chat/create, "tools" and "tool_choice";
https://platform.openai.com/docs/guides/function-calling, "Custom tools" and "Strict mode".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inferplane.dialogue.replies.calls import MAX_CALLS
from inferplane.dialogue.replies.parser import Mode
from inferplane.dialogue.schema_refs import rebase_refs
from inferplane.serving.chat.custom_input import input_schema
from inferplane.serving.chat.request import (
    AllowedTools,
    ChatRequest,
    CustomTool,
    GrammarFormat,
    NamedCustomTool,
    NamedTool,
    Tool,
)
from inferplane.serving.constraints.schemas import arguments_schema, relax
from inferplane.serving.errors import invalid


@dataclass(frozen=True)
class ToolPlan:
    """What the tools of a request mean for its text.

    Args:
        mode: "none": no calls; "auto": the text may contain calls; "required": it has one call or more; "named": it has
            a call of one function.
        tools: name -> schema of the arguments, of the tools that may be called.
        named: the function of mode "named".
        parallel: an answer may make several calls.
        not_enforced: keywords of the schemas that are not enforced.
        custom: custom tools among them -> the grammar of their text; None for any text.
        is_strict: a schema is to be enforced or refused.
    """

    mode: Mode = "none"
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    named: str = ""
    parallel: bool = True
    not_enforced: tuple[str, ...] = ()
    custom: Mapping[str, GrammarFormat | None] = field(default_factory=dict)
    is_strict: bool = False

    @property
    def is_forced(self) -> bool:
        """The text has a call."""
        return self.mode in ("required", "named")

    @property
    def max_calls(self) -> int:
        """Most calls in an answer."""
        return MAX_CALLS if self.parallel and self.mode != "named" else 1

    def constraint(self) -> dict[str, Any]:
        """Return the constraint of a forced call in generic JSON, as fields of `SamplingParams`: in mode "required" a
        list of objects with name and arguments, in mode "named" the arguments alone, or a custom tool's text.
        """
        if self.mode == "required":
            return {"json_schema": _schema_of_calls(self.tools, self.max_calls)}
        if self.named not in self.custom:
            return {"json_schema": dict(self.tools[self.named])}
        grammar = self.custom[self.named]
        if grammar is None:
            return {}
        return {"regex" if grammar.syntax == "regex" else "grammar": grammar.definition}


def plan_tools(request: ChatRequest) -> ToolPlan:
    """Return what the tools of a request mean; raise ApiError 400 if `tool_choice` names a missing tool, or the
    arguments of one are no object.
    """
    tools: dict[str, Mapping[str, Any]] = {}
    custom: dict[str, GrammarFormat | None] = {}
    dropped, is_strict = set[str](), False
    for tool in request.tools or ():
        if isinstance(tool, CustomTool):
            grammar = tool.custom.grammar
            custom[tool.name] = grammar
            is_regex = grammar is not None and grammar.syntax == "regex"
            schema = input_schema(grammar.definition if grammar is not None and is_regex else None)
            if grammar is not None and not is_regex:
                dropped.add("custom.format")
            tools[tool.name] = relax(schema, dropped)
        else:
            schema = arguments_schema(tool.name, tool.function.parameters)
            tools[tool.name] = schema if tool.function.strict else relax(schema, dropped)
            is_strict = is_strict or bool(tool.function.strict)
    mode, allowed = _read_choice(request, tools, custom)
    if mode == "none" or not tools:
        return ToolPlan()
    tools = {name: schema for name, schema in tools.items() if name in allowed}
    if mode == "named" and allowed[0] in custom:
        dropped.discard("custom.format")  # the whole text is the tool's, and follows its grammar
    named = allowed[0] if mode == "named" else ""
    parallel = request.parallel_tool_calls is not False
    shown = {name: grammar for name, grammar in custom.items() if name in tools}
    return ToolPlan(mode, tools, named, parallel, tuple(sorted(dropped)), shown, is_strict)


def _read_choice(
    request: ChatRequest, tools: Mapping[str, Any], custom: Mapping[str, Any]
) -> tuple[Mode, Sequence[str]]:
    """Return the mode, and the names of the tools that may be called."""
    choice = request.tool_choice
    if isinstance(choice, (NamedTool, NamedCustomTool)):
        _check_named(choice, tools, custom, "tool_choice")
        return "named", [choice.name]
    if isinstance(choice, AllowedTools):
        allowed = choice.allowed_tools
        for i, tool in enumerate(allowed.tools):
            _check_named(tool, tools, custom, f"tool_choice.allowed_tools.tools[{i}]")
        return allowed.mode, [tool.name for tool in allowed.tools]
    if not tools and choice == "required":
        raise invalid("tool_choice is 'required', and there are no tools.", "tool_choice")
    return choice or "auto", list(tools)


def _check_named(
    choice: NamedTool | NamedCustomTool, tools: Mapping[str, Any], custom: Mapping[str, Any], path: str
) -> None:
    is_custom = isinstance(choice, NamedCustomTool)
    if choice.name not in tools or (choice.name in custom) != is_custom:
        kind = "custom tools" if is_custom else "tools"
        raise invalid(f"{path} names {choice.name!r}, which is none of the {kind}.", path)


def list_shown_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Return tools as templates get them: functions as the client wrote them, custom tools as functions of a text."""
    return [_make_function(tool) if isinstance(tool, CustomTool) else tool.given for tool in tools or ()]


def _make_function(tool: CustomTool) -> dict[str, Any]:
    grammar, words = tool.custom.grammar, tool.custom.description or ""
    if grammar is not None:
        words = f"{words}\n\nThe input follows this {grammar.syntax} grammar:\n{grammar.definition}".lstrip()
    function = {"name": tool.name, "description": words, "parameters": input_schema()}
    return {"type": "function", "function": function}


def _schema_of_calls(tools: Mapping[str, Mapping[str, Any]], most: int) -> dict[str, Any]:
    """Return the JSON schema of a list of calls."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, name in enumerate(tools)
    ]
    schemas = {str(i): rebase_refs(schema, f"#/$defs/{i}") for i, schema in enumerate(tools.values())}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": most, "$defs": schemas}
