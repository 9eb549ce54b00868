"""The forms in which models write thoughts and tool calls: records of marks, so that a new form is a row of a table.

Plugins register forms of their own by the hook `inferplane_register_reply_forms`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from inferplane.errors import UsageError

Syntax = Literal["json", "named_json", "parameters", "python", "harmony"]
"""How a call is written. "json": an object with name and arguments, or a list of such objects. "named_json": the name
in a header, then the arguments as a JSON object. "parameters": the name, then each argument between marks. "python":
`[name(key=value)]`. "harmony": gpt-oss's messages, whose headers name channel and recipient."""
KeyKind = Literal["schema", "text", "json"]
"""What the value of a parameter is: by the schema of the function, text, or JSON."""
NAME_CHARACTERS = r"[A-Za-z0-9_.\-]"
"""The characters of a function's name in a text, as a regular expression."""
_SLOTS = {"name": rf"(?P<name>{NAME_CHARACTERS}+?)", "index": r"(?P<index>\d+)", "id": r"(?P<id>[A-Za-z0-9_\-]+)"}


@dataclass(frozen=True)
class ReasoningForm:
    """The marks of a thought, which comes before the answer.

    Args:
        begin: the mark before it. It counts at the beginning of a reply only, since an answer may speak of it.
        end: the mark after it.
        other_begin_marks, other_end_marks: other spellings.
        answer_begin, answer_end: marks around the answer after the thought; "": there are none.
        padding: characters of white space around the thought that belong to its marks.
        forced_end: text that ends the thought before the model does; "": line ends around `end`.
        template_marks: strings by which a chat template with this form is recognized: it has all of them.
        ended_by_calls: a call in the thought ends it; else its mark is a word of the thought.
    """

    begin: str
    end: str
    other_begin_marks: tuple[str, ...] = ()
    other_end_marks: tuple[str, ...] = ()
    answer_begin: str = ""
    answer_end: str = ""
    padding: str = "\n"
    forced_end: str = ""
    template_marks: tuple[str, ...] = ()
    ended_by_calls: bool = False

    def __post_init__(self) -> None:
        if not (self.begin and self.end):
            raise UsageError("A ReasoningForm lacks marks.", remedy="give begin and end, which are texts")
        if not self.forced_end:
            object.__setattr__(self, "forced_end", f"\n{self.end}\n\n")

    @property
    def begin_marks(self) -> tuple[str, ...]:
        """All marks that begin a thought."""
        return (self.begin, *self.other_begin_marks)

    @property
    def end_marks(self) -> tuple[str, ...]:
        """All marks that end a thought."""
        return (self.end, *self.other_end_marks)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of the form."""
        return (*self.begin_marks, *self.end_marks, *filter(None, (self.answer_begin, self.answer_end)))

    def is_open_after(self, prompt: str) -> bool:
        """Whether a rendered prompt has begun the thought, so that the reply starts inside of it."""
        text = prompt.rstrip()
        return any(text.endswith(mark.rstrip()) for mark in self.begin_marks)


@dataclass(frozen=True)
class ToolForm:
    """The marks of tool calls.

    Args:
        syntax: how a call is written.
        begin, end: marks around all calls, or around each where `call_begin` is "". Without `begin` and `call_begin`,
            calls are recognized at the beginning of an answer only.
        call_begin, call_end: marks around one call.
        headers: of "named_json": what is between `call_begin` and the arguments, with the slots `{name}`, `{index}`
            and `{id}`; the first is what the model writes most. White space in it matches any.
        id_form: the call's id, with the same slots; "": the id of the header, if it has one.
        name_end: of "parameters": the mark after the name; "": the next mark ends it.
        key_begin: of "parameters": the mark before a parameter's name.
        key_end_marks: of "parameters": marks after it, with what they say of the value.
        value_begin, value_end: of "parameters": marks around a value; white space before `value_begin` is none of it.
        value_padding: one of these characters may stand at both sides of a value and is none of it.
        name_keys, argument_keys, id_keys: of "json": keys of the object; a call that is written has the first of each.
        uses_list: of "json" and "python": the model writes all calls as one list, in brackets.
        separator: white space that a template writes between content and calls: it is no content.
        tokens: special tokens inside headers.
        template_marks: strings by which a chat template with this form is recognized: it has all of them.
        answer_label: text with which an answer begins where tools are shown; it is no content.
    """

    syntax: Syntax
    begin: str = ""
    end: str = ""
    call_begin: str = ""
    call_end: str = ""
    headers: tuple[str, ...] = ()
    id_form: str = ""
    name_end: str = ""
    key_begin: str = ""
    key_end_marks: tuple[tuple[str, KeyKind], ...] = ()
    value_begin: str = ""
    value_end: str = ""
    value_padding: str = ""
    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    id_keys: tuple[str, ...] = ("id",)
    uses_list: bool = False
    separator: str = ""
    tokens: tuple[str, ...] = ()
    template_marks: tuple[str, ...] = ()
    answer_label: str = ""

    def __post_init__(self) -> None:
        needed = {"named_json": ("headers",), "parameters": ("call_begin", "call_end", "key_begin", "key_end_marks")}
        missing = [name for name in needed.get(self.syntax, ()) if not getattr(self, name)]
        if self.syntax == "parameters" and not self.value_end:
            missing.append("value_end")
        if missing:
            there = f"the syntax {self.syntax!r}, which needs {', '.join(missing)}"
            raise UsageError("A ToolForm lacks marks.", there_is=there, remedy="give them, or another syntax")

    @property
    def trigger(self) -> str:
        """The mark with which calls begin; "": they begin where an answer begins."""
        return self.begin or self.call_begin

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of the form."""
        found = (self.begin, self.end, self.call_begin, self.call_end, *self.tokens)
        values = (self.key_begin, *(mark for mark, _ in self.key_end_marks), self.value_begin, self.value_end)
        return tuple(mark for mark in (*found, *values) if mark)

    @cached_property
    def header_patterns(self) -> tuple[re.Pattern[str], ...]:
        """`headers` as regular expressions with the groups `name`, `index` and `id`."""
        return tuple(map(_compile_header, self.headers))


def _compile_header(header: str) -> re.Pattern[str]:
    parts = re.split(r"(\{(?:name|index|id)\}|\s+)", header)
    return re.compile(r"\s*" + "".join(_SLOTS.get(p[1:-1]) or (r"\s*" if p.isspace() else re.escape(p)) for p in parts))


@dataclass(frozen=True)
class ReplyForm:
    """How a family of models writes thoughts and calls.

    Args:
        name: by which `--reasoning-parser` and `--tool-call-parser` choose it.
        reasoning: the form of thoughts; None: there are none.
        tools: forms of calls. The first is what the model is trained on; others are recognized too.
        other_names: other names of the form, such as those of other servers.
        model_types: `model_type` of configs whose models write this form, where the template does not decide.
        more_tokens: special tokens, beside the marks, that must stay in the decoded text.
    """

    name: str
    reasoning: ReasoningForm | None = None
    tools: tuple[ToolForm, ...] = ()
    other_names: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    more_tokens: tuple[str, ...] = ()

    @property
    def uses_channels(self) -> bool:
        """A reply consists of messages with headers, as gpt-oss writes them."""
        is_channel = self.reasoning is not None and "<|channel|>" in self.reasoning.begin
        return is_channel or any(form.syntax == "harmony" for form in self.tools)

    @cached_property
    def visible_tokens(self) -> tuple[str, ...]:
        """Texts that must stay in the decoded text where they are special tokens: marks, each once."""
        reasoning = self.reasoning.marks if self.reasoning else ()
        return tuple(dict.fromkeys((*reasoning, *(m for form in self.tools for m in form.marks), *self.more_tokens)))
