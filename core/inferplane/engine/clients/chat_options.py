"""Options of a conversation in Python, and what they are in the variables of a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from reprlib import repr as short
from typing import Any

from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.dialogue.template import RESERVED, SWITCHES, Template, is_template_source
from inferplane.engine.request.arguments import as_bool, as_integer
from inferplane.engine.request.fields import MAX_COUNT
from inferplane.engine.request.other_engines import advice
from inferplane.engine.request.params import unknown_keyword
from inferplane.errors import UsageError, warn

TOOL_CHOICES = ("auto", "none", "required")
CHOICE_FORM = '{"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation becomes a prompt, and which parts of the reply are separated.

    Args:
        tools: functions that the model may call, in OpenAI's form.
        tool_choice: "auto": the reply may have calls; "none": it has none, and the model is shown no tools; "required":
            it has one call or more; {"type": "function", "function": {"name": ...}}: it is a call of this one.
        chat_template: a Jinja template in place of the checkpoint's.
        chat_template_kwargs: further variables for the template.
        continue_final_message: continue the last message in place of a new reply.
        thinking: whether the model thinks, by the variable of its template that says so; None: as the template has it.
        thinking_token_budget: most tokens of the thought, which is then ended. None: any number.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool = False
    thinking: bool | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        if self.chat_template is not None and not is_template_source(self.chat_template):
            raise UsageError(
                f"chat_template = {short(self.chat_template)} is no Jinja template: it has neither {{{{ nor {{%.",
                remedy="pass the template's text, Path(FILE).read_text(), not the name of a file",
            )
        as_bool("continue_final_message", self.continue_final_message)
        if self.thinking is not None:
            as_bool("thinking", self.thinking)
        if self.thinking_token_budget is not None:
            as_integer("thinking_token_budget", self.thinking_token_budget, 0, MAX_COUNT)
        if not _is_choice(self.tool_choice):
            there_is = f"{', '.join(map(repr, TOOL_CHOICES))}, and {CHOICE_FORM}"
            raise UsageError(f"tool_choice = {short(self.tool_choice)}.", there_is=there_is)
        variables = self.chat_template_kwargs
        if variables is not None and not isinstance(variables, Mapping):
            what = f"chat_template_kwargs = {short(variables)}."
            raise UsageError(what, there_is="a mapping of the template's variables by name")
        for name in variables or {}:
            if name in RESERVED:
                raise UsageError(f"chat_template_kwargs cannot set {name}.", remedy="see ChatOptions for what can")

    @classmethod
    def of(cls, call: str, options: Mapping[str, Any]) -> ChatOptions:
        """Options from the keyword arguments of a call by its name; UsageError for one that is none."""
        known = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name not in known:
                raise unknown_keyword(call, name, value, ["messages", "params", *known], advice(name))
        return cls(**options)


def _is_choice(value: Any) -> bool:
    """Whether a value is a word of `TOOL_CHOICES`, or names a function in OpenAI's form."""
    if not isinstance(value, Mapping):
        return isinstance(value, str) and value in TOOL_CHOICES
    function = value.get("function")
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and bool(function["name"])


def find_switches(template: Template) -> list[str]:
    """The variables by which a template turns the thought on and off; empty if it reads none."""
    return [name for name in SWITCHES if template.reads_variable(name)]


def template_variables(template: Template, form: ReplyForm, options: ChatOptions) -> dict[str, Any]:
    """The template's variables. Warns about those that it does not read, which have no effect, and about
    `thinking=False` for a model that is not known to think.

    Raises:
        UsageError: the model does not think, or its template cannot turn the thought on or off.
    """
    variables: dict[str, Any] = {"add_generation_prompt": not options.continue_final_message}
    own = dict(options.chat_template_kwargs or {})
    unread = [name for name in own if not template.reads_variable(name)]
    if unread:
        warn(f"chat_template_kwargs has no effect with {', '.join(unread)}: the chat template does not read it.")
    if options.thinking is None:
        return {**variables, **own}
    switches = find_switches(template)
    if not switches and form.reasoning is None:
        if options.thinking:
            raise UsageError(
                "thinking = True: this model is not known to think.",
                there_is=f"a chat template without the marks of a thought; replies are read as {form.name!r}",
                remedy="leave it out",
            )
        warn("thinking = False has no effect: this model is not known to think.")
    elif not switches:
        what = f"thinking = {options.thinking}: the model's chat template does not read it."
        raise UsageError(what, remedy="leave it out, or limit the thought by thinking_token_budget")
    return {**variables, **dict.fromkeys(switches, options.thinking), **own}
