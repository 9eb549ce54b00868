"""The tools of a request: what `tool_choice` allows and demands, and the constraint for calls in generic JSON.

Sources: https://platform.openai.com/docs/api-reference/chat/create, "tools" and "tool_choice";
https://platform.openai.com/docs/guides/function-calling, "Custom tools" and "Strict mode".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inferplane.dialogue.replies.call_rules import CallRules
from inferplane.dialogue.replies.parser import Mode
from inferplane.dialogue.schema_limits import arguments_schema, relax
from inferplane.errors import UsageError
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
from inferplane.serving.errors import invalid


@dataclass(frozen=True)
class ToolPlan(CallRules):
    """What the tools of a request mean for its text.

    Args:
        not_enforced: keywords of the schemas that are not enforced.
        custom: custom tools among the tools -> the grammar of their text; None for any text.
    """

    not_enforced: tuple[str, ...] = ()
    custom: Mapping[str, GrammarFormat | None] = field(default_factory=dict)

    def constraint(self) -> dict[str, Any]:
        """As of `CallRules`; of a named custom tool it is that of its text, which may be none."""
        if self.mode != "named" or self.named not in self.custom:
            return super().constraint()
        grammar = self.custom[self.named]
        if grammar is None:
            return {}
        return {"regex" if grammar.syntax == "regex" else "grammar": grammar.definition}


def plan_tools(request: ChatRequest) -> ToolPlan:
    """Return what the tools of a request mean; raise ApiError 400 if `tool_choice` names a missing tool, two have one
    name, or the arguments of one are no object.
    """
    tools: dict[str, Mapping[str, Any]] = {}
    custom: dict[str, GrammarFormat | None] = {}
    dropped, strict = set[str](), set[str]()
    for tool in request.tools or ():
        if tool.name in tools:
            raise invalid(f"tools: Two tools have the name {tool.name[:80]!r}.", "tools")
        if isinstance(tool, CustomTool):
            grammar = tool.custom.grammar
            custom[tool.name] = grammar
            is_regex = grammar is not None and grammar.syntax == "regex"
            schema = input_schema(grammar.definition if grammar is not None and is_regex else None)
            if grammar is not None and not is_regex:
                dropped.add("custom.format")
            tools[tool.name] = relax(schema, dropped)
        else:
            try:
                schema = arguments_schema(tool.name, tool.function.parameters)
            except UsageError as error:
                raise invalid(error.what, "tools") from error
            tools[tool.name] = schema if tool.function.strict else relax(schema, dropped)
            strict |= {tool.name} if tool.function.strict else set()
    mode, allowed = _read_choice(request, tools, custom)
    if mode == "none" or not tools:
        return ToolPlan()
    tools = {name: schema for name, schema in tools.items() if name in allowed}
    if mode == "named" and allowed[0] in custom:
        dropped.discard("custom.format")  # the whole text is the tool's, and follows its grammar
    named = allowed[0] if mode == "named" else ""
    parallel = request.parallel_tool_calls is not False
    shown = {name: grammar for name, grammar in custom.items() if name in tools}
    return ToolPlan(mode, tools, named, parallel, frozenset(strict), tuple(sorted(dropped)), shown)


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
