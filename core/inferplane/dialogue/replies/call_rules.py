"""The calls that a reply may have or has to have, and the rules of their text while it is generated.

They are in the form of the model's family, or in generic JSON where that is not known or its grammar is too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from inferplane.dialogue.replies.calls import MAX_CALLS
from inferplane.dialogue.replies.catalog import choose_form
from inferplane.dialogue.replies.forms import ReplyForm, ToolForm
from inferplane.dialogue.replies.grammar import MAX_BYTES, make_call_grammar
from inferplane.dialogue.replies.parser import Mode
from inferplane.dialogue.schema_limits import arguments_schema, relax
from inferplane.dialogue.schema_refs import rebase_refs
from inferplane.errors import UsageError

JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
"""White space in arguments; without a limit some models write it for ever."""
TOOL_FORM = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
GENERIC = "json"
"""Name of the form of calls that are JSON alone."""


@dataclass(frozen=True)
class CallRules:
    """Which calls a reply may have.

    Args:
        mode: "none": no calls; "auto": the text may contain calls; "required": it has one call or more; "named": it has
            a call of one function.
        tools: name -> schema of the arguments, of the tools that may be called.
        named: the function of mode "named".
        parallel: a reply may make several calls.
        strict: functions whose schemas are to be enforced or refused.
    """

    mode: Mode = "none"
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    named: str = ""
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def is_forced(self) -> bool:
        """The text has a call."""
        return self.mode in ("required", "named")

    @property
    def is_strict(self) -> bool:
        """A schema is to be enforced or refused."""
        return not self.strict.isdisjoint(self.tools)

    @property
    def max_calls(self) -> int:
        """Most calls in a reply."""
        return MAX_CALLS if self.parallel and self.mode != "named" else 1

    def constraint(self) -> dict[str, Any]:
        """Return the constraint of a forced call in generic JSON, as fields of `SamplingParams`: in mode "required" a
        list of objects with name and arguments, in mode "named" the arguments alone.
        """
        if self.mode == "required":
            return {"json_schema": _schema_of_calls(self.tools, self.max_calls)}
        return {"json_schema": dict(self.tools[self.named])}


def read_rules(tools: Sequence[Any], choice: Any) -> tuple[CallRules, list[str]]:
    """Return the rules that tools and a choice in OpenAI's form mean, and the keywords of the schemas that no rule
    enforces.

    Args:
        tools: functions.
        choice: "auto", "none", "required", or the form of one function.

    Raises:
        UsageError: a tool is no function in OpenAI's form, two have one name, or the choice demands one that is not
            there.
    """
    schemas, strict, dropped = dict[str, Mapping[str, Any]](), set[str](), set[str]()
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise UsageError(f"tools[{i}] = {short(tool)}.", there_is=f"functions as {TOOL_FORM}")
        if name in schemas:
            raise UsageError(
                f"tools[{i}] has the name {short(name)}, as a tool before it.", remedy="rename one of them"
            )
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise UsageError(
                f"tools[{i}].function.parameters = {short(parameters)}.", there_is="JSON schemas as mappings"
            )
        schema = arguments_schema(name, parameters)
        schemas[name] = schema if function.get("strict") is True else relax(schema, dropped)
        strict |= {name} if function.get("strict") is True else set()
    if choice == "none" or (choice == "auto" and not schemas):
        return CallRules(), []
    named = "" if isinstance(choice, str) else str(choice["function"]["name"])
    if named not in ("", *schemas) or not schemas:
        what = f"tool_choice = {short(choice)}."
        there_is = f"tools {', '.join(map(repr, schemas))}" if schemas else "no tools"
        raise UsageError(what, there_is=there_is, remedy="pass the function in tools, or another choice")
    mode: Mode = "named" if named else choice
    chosen = {named: schemas[named]} if named else schemas
    return CallRules(mode, chosen, named, strict=frozenset(strict)), sorted(dropped)


def demand_calls(
    form: ReplyForm, rules: CallRules, special_tokens: Mapping[str, int], unenforced: set[str] | None = None
) -> dict[str, Any] | None:
    """Return the constraint of demanded calls in the form of the family, as a field of `SamplingParams`; None if they
    have to be in generic JSON.

    Args:
        form: how the model writes calls.
        rules: of mode "required" or "named".
        special_tokens: text -> id, of the tokenizer's special tokens.
        unenforced: gets the keywords of schemas that have no effect in this form.
    """
    own = form.tools[0] if form.tools else None
    if own is None or not own.template_marks:
        return None
    grammar = make_grammar(own, rules, special_tokens, unenforced, is_triggered=False)
    return {"grammar": grammar} if grammar else None


def make_grammar(
    form: ToolForm,
    rules: CallRules,
    special_tokens: Mapping[str, int],
    unenforced: set[str] | None = None,
    *,
    is_triggered: bool,
) -> str:
    """Return the grammar of calls; "" if it is too long, or the form cannot hold the calls to their schemas. Arguments
    as of `make_call_grammar` and `demand_calls`.
    """
    options: Any = {"max_calls": rules.max_calls, "is_triggered": is_triggered, "json_options": JSON_OPTIONS}
    options.update(max_bytes=MAX_BYTES, unenforced=unenforced, strict=rules.strict)
    return make_call_grammar(form, rules.tools, special_tokens, **options)


def read_generic(form: ReplyForm, is_open: bool) -> tuple[ReplyForm, bool]:
    """Return the form in which demanded calls in generic JSON are read, and whether the prompt has begun a thought.
    JSON alone has no header, and so no place for a thought before it where a reply has channels.

    Args:
        form: how the model writes.
        is_open: the prompt has begun a thought.
    """
    chosen = choose_form(form, tools=GENERIC)
    return (choose_form(chosen, reasoning="none"), False) if form.uses_channels else (chosen, is_open)


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
