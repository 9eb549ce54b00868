"""A checkpoint's chat template, and the forms of a conversation in which a template may accept it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from inferplane.dialogue.messages import MAX_ARGUMENT_VALUES, count_values
from inferplane.dialogue.renderer import Renderer, RenderError
from inferplane.dialogue.tools import describe_tools
from inferplane.errors import UsageError, sentence

Messages = Sequence[Mapping[str, Any]]
_NO_CONTENT = re.compile(r"content['\"]?\]? is (not )?none")
_WORD = re.compile(r"\w+")
_OPENING, _CLOSING = re.compile(r"\{[{%]"), re.compile(r"[%}]\}")
_QUOTED = re.compile(r"'[^'\\]*(?:\\.?[^'\\]*)*(?:'|\Z)|\"[^\"\\]*(?:\\.?[^\"\\]*)*(?:\"|\Z)", re.DOTALL)
"""Texts in quotes. One that is never closed goes on to the end, so that the time grows by the length alone."""
_WHOLE = re.compile(r"\bmessages?\s*\|\s*tojson|\bmessage\.(?:items|keys|values)\b|\bmessage\s*\|\s*items")
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn the thought on and off; a template reads one of them."""
RESERVED = ("messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message")
"""Variables and options that have arguments of their own, or that a caller cannot set."""
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The only ids of calls that Mistral's templates accept."""
MAX_DIGITS = 400
"""Most digits of an integer in a call's arguments; with more of them, the arguments stay text."""


def is_template_source(text: Any) -> bool:
    """Whether a text may be a Jinja template, and not the name of a file: one without expressions and statements would
    render every conversation as the same text.
    """
    return isinstance(text, str) and ("{{" in text or "{%" in text)


@dataclass(frozen=True)
class Template:
    """A chat template: Jinja source, and the special tokens by their names in it.

    Args:
        source: the template.
        tokens: special tokens.
        tool_source: another template for conversations with tools; None: `source` renders them too.
    """

    source: str
    tokens: Mapping[str, Any]
    tool_source: str | None = None

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Template | None:
        """The template of a tokenizer of transformers; None if it has none."""
        found, tokens = tokenizer.chat_template, dict(tokenizer.special_tokens_map)
        if isinstance(found, Mapping):
            plain = found.get("default") or next(iter(found.values()), None)
            return cls(str(plain), tokens, found.get("tool_use")) if plain else None
        return cls(str(found), tokens) if found else None

    @property
    def supports_tools(self) -> bool:
        """It reads the tools of a request."""
        return self.tool_source is not None or "tools" in self.source

    @property
    def supports_null_content(self) -> bool:
        """It recognizes an assistant message with only tool calls by the content None, not by an empty text."""
        return _NO_CONTENT.search(self.tool_source or self.source) is not None

    def reads(self, key: str) -> bool:
        """Whether it names a key of a message, or shows messages whole."""
        return "" in self._words or key in self._words or (not key.isidentifier() and key in self._text)

    def reads_variable(self, name: str) -> bool:
        """Whether it reads a variable: a name in its expressions that is no attribute and no text."""
        return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", self._expressions) is not None

    @cached_property
    def _expressions(self) -> str:
        """What is between its braces, without texts in quotes."""
        return "\n".join(_QUOTED.sub("''", inside) for inside in _find_inside(self._text))

    @property
    def _text(self) -> str:
        return f"{self.source} {self.tool_source or ''}"

    @cached_property
    def _words(self) -> frozenset[str]:
        """The words in it; "" among them if it shows messages whole."""
        return frozenset((*_WORD.findall(self._text), *([""] if _WHOLE.search(self._text) else ())))

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.source, self.tokens)

    @cached_property
    def _tool_renderer(self) -> Renderer:
        return self._renderer if self.tool_source is None else Renderer(self.tool_source, self.tokens)

    @property
    def all_sources(self) -> str:
        """The template, and that for conversations with tools, as one text."""
        return f"{self.source}\n{self.tool_source or ''}"

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation, with the beginning of a reply unless the variable `add_generation_prompt` is false.

        Args:
            messages: of `normalize_messages`.
            tools: that may be called; they become text if the template does not support them.
            variables: further variables of the template.

        Raises:
            UsageError: the template refuses it in every form, takes too long, or needs too much memory.
        """
        refusal = ""
        description = describe_tools(tools) if tools and not self.supports_tools else ""
        renderer = self._tool_renderer if tools else self._renderer
        given = {**(variables or {}), "tools": list(tools) or None}
        for plain in forms(self, messages, description):
            try:
                return renderer.render({**given, "messages": list(plain)})
            except RenderError as error:
                if error.reason != "refused":  # in any form
                    raise UsageError(error.message) from error
                refusal = refusal or error.message
        raise UsageError(describe_refusal(refusal))


def _find_inside(text: str) -> Iterator[str]:
    """Yield what is between a template's braces, in a time that grows by its length alone."""
    at = 0
    while (opening := _OPENING.search(text, at)) and (closing := _CLOSING.search(text, opening.end())):
        yield text[opening.end() : closing.start()]
        at = closing.end()


def describe_refusal(why: str) -> str:
    """What to say of a conversation that a template refuses."""
    return sentence(f"The chat template refuses these messages: {why}")


def forms(template: Template, messages: Messages, description: str = "") -> Iterator[Messages]:
    """Yield a conversation in the forms that templates ask for, the most common first.

    Some take a call's arguments as data, others as text; some want ids of nine letters and digits; some recognize a
    message with only calls by the content None; some refuse the system's role, in which tools are described.

    Args:
        template: decides which forms are possible.
        messages: of `normalize_messages`.
        description: of the tools, for a template that does not support them; "": there is nothing to describe.
    """
    called = [call for message in messages for call in message.get("tool_calls") or ()]
    empties = (None, "") if called and template.supports_null_content else ("",)
    arguments: tuple[str, ...] = ("data", "text") if called else ("data",)
    data = {text: _data(text) for text in (call["function"]["arguments"] for call in called)}
    if not all(isinstance(value, dict) for value in data.values()):
        arguments = (*arguments, "wrapped")  # broken JSON is text, for which some templates have no place
    ids = [i for message in messages for i in _ids(message)]
    shorten = (False, True) if called and not all(i and _SHORT_ID.fullmatch(i) for i in ids) else (False,)
    roles = ("system", "user") if description else ("",)
    for empty, form, short, role in product(empties, arguments, shorten, roles):
        given = _with_short_ids(messages) if short else messages
        changed = [_with_calls(message, empty, form, data) for message in given]
        yield _prepend(description, changed, role) if description else changed


def _ids(message: Mapping[str, Any]) -> list[str | None]:
    """The ids of the calls in a message, or of the call that it answers."""
    own = [message.get("tool_call_id")] if message["role"] == "tool" else []
    return [*(call.get("id") for call in message.get("tool_calls") or ()), *own]


def _with_calls(message: Mapping[str, Any], empty: str | None, form: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as "data", "text", or "wrapped" (data, even if they are no object), and
    with the content `empty` if it has only calls. `data` has the data of each text of arguments.
    """
    out = dict(message)
    if message.get("tool_calls"):
        out["content"] = message["content"] or empty
        out["tool_calls"] = [_with_arguments(call, form, data) for call in message["tool_calls"]]
    return out


def _with_arguments(call: Mapping[str, Any], form: str, data: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"], form, data)}}


def _arguments(text: str, form: str, data: Mapping[str, Any]) -> Any:
    found = data[text] if form != "text" else None
    if found is None:
        found = text
    return found if form != "wrapped" or isinstance(found, dict) else {"arguments": text}


def _data(text: str) -> Any:
    """JSON as data; None for text that is none, as of a call that was cut off, and for text with too many values."""
    if count_values(text, MAX_ARGUMENT_VALUES) > MAX_ARGUMENT_VALUES:
        return None
    try:
        return json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError):
        return None


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:  # Python takes a time that grows by the square of their number
        raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
    return int(digits)


def _with_short_ids(messages: Messages) -> list[dict[str, Any]]:
    """Messages whose calls, and answers to them, have ids of nine letters and digits: their own if these are such, else
    ones made of them. Answers without an id get those of the calls before them, in order.
    """
    out, waiting, count = [], [], 0
    for message in messages:
        changed = dict(message)
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                calls.append({**call, "id": _short_id(call.get("id") or f"call {count}")})
                count += 1
            changed["tool_calls"], waiting = calls, [call["id"] for call in calls]
        elif message["role"] == "tool":
            own = message.get("tool_call_id")
            changed["tool_call_id"] = _short_id(own) if own else waiting.pop(0) if waiting else _short_id("")
            if changed["tool_call_id"] in waiting:
                waiting.remove(changed["tool_call_id"])
        out.append(changed)
    return out


def _short_id(own: str) -> str:
    return own if _SHORT_ID.fullmatch(own) else hashlib.sha256(own.encode("utf-8", "replace")).hexdigest()[:9]


def _prepend(text: str, messages: Messages, role: str) -> list[Mapping[str, Any]]:
    """Put a text before the first message of a role; if there is none, such a message comes first."""
    at = next((i for i, message in enumerate(messages) if message["role"] == role), None)
    if at is None:
        return [{"role": role, "content": text}, *messages]
    changed = {**messages[at], "content": f"{text}\n\n{messages[at]['content'] or ''}"}
    return [*messages[:at], changed, *messages[at + 1 :]]
