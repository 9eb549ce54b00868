"""Grammars of calls in a model's own form, for calls that are demanded, and for those that have begun.

They are in llguidance's dialect of Lark. Marks that are special tokens are written as these tokens, all else as text.
Arguments that are JSON follow the schema; those between marks follow it in their types: JSON as the schema of the
parameter says, texts freely. Parameters that stand one by one come in the order of the schema.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from inferplane.dialogue.replies.arguments import NotInForm, list_arguments, list_choices, list_limits
from inferplane.dialogue.replies.calls import MAX_CALLS
from inferplane.dialogue.replies.forms import KeyKind, ToolForm
from inferplane.dialogue.replies.values import JsonTypes, TypeFinder, quote
from inferplane.dialogue.schema_refs import extract_part, find_referenced

MAX_BYTES = 64 * 1024
"""Most bytes of a grammar that the engine takes."""
Tools = Mapping[str, Mapping[str, Any]]
SPACE = r"/[ \t\n]{0,8}/"
"""White space where a model may write some."""
ANY_KEY, ANY_KEYWORD = r'/[^<>"=\n]{1,256}/', "/[A-Za-z_][A-Za-z0-9_]*/"
"""Names of arguments that no schema lists: between marks, and in Python."""
COMMA_CALL, LINE_CALL = 'ws "," ws call', r'"\n" call'
HARMONY_START = "<|start|>assistant"
"""What precedes a message after the first one."""


def make_call_grammar(
    form: ToolForm,
    tools: Tools,
    special_tokens: Mapping[str, int] | None = None,
    *,
    max_calls: int = MAX_CALLS,
    is_triggered: bool = False,
    json_options: Mapping[str, Any] | None = None,
    max_bytes: int | None = None,
    unenforced: set[str] | None = None,
    strict: Collection[str] = (),
) -> str:
    """Return the grammar of one or more calls, as Lark text; "" if the form cannot hold the calls to their schemas, as
    one that writes arguments one by one cannot where a schema does not list them.

    Args:
        form: how the calls are written.
        tools: name -> JSON schema of the parameters, of the functions that may be called; at least one.
        special_tokens: text -> id, of the tokenizer's special tokens.
        max_calls: most calls between the marks around all of them; 1: one call.
        is_triggered: the text begins behind `form.trigger`, and ends with the marks that belong to it. A function whose
            arguments the form cannot hold to its schema takes any then, so that the others keep their rules.
        json_options: options of llguidance for each schema, as its `x-guidance` has them.
        max_bytes: a longer grammar is "" too.
        unenforced: gets the keywords of the schemas that have no effect on arguments that are written as text;
            "parameters" for a whole schema.
        strict: functions whose schemas have to have their whole effect.
    """
    writer = _GrammarWriter(form, special_tokens or {}, json_options, max_bytes)
    try:
        calls = [
            writer.add_call(name, schema, is_strict=name in strict, may_be_any=is_triggered)
            for name, schema in tools.items()
        ]
    except (NotInForm, LookupError, _TooLong):
        return ""
    if unenforced is not None:
        unenforced |= writer.unenforced
    writer.rules["call"] = " | ".join(calls)
    writer.rules["start"] = writer.join_calls(max_calls, is_triggered)
    rules = sorted(writer.rules.items(), key=lambda rule: rule[0] != "start")
    grammar = "\n".join(f"{name}: {rule}" for name, rule in rules)
    return grammar if max_bytes is None or len(grammar.encode()) <= max_bytes else ""


class _TooLong(Exception):
    """The schemas alone are longer than the grammar may be."""


class _GrammarWriter:
    """Collects the rules of a grammar."""

    def __init__(
        self,
        form: ToolForm,
        special_tokens: Mapping[str, int],
        options: Mapping[str, Any] | None,
        max_bytes: int | None,
    ) -> None:
        self._left = float("inf") if max_bytes is None else max_bytes
        self._form, self._special, self._options = form, special_tokens, options
        names = sorted((name for name in special_tokens if name), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self.rules: dict[str, str] = {"ws": SPACE}
        self.unenforced = set[str]()
        self._followed = set[int](), set[int]()  # what one function refers to, as choices and else
        self._choices: dict[int, Sequence[str | None] | None] = {}

    # -- all calls

    def join_calls(self, most: int, is_triggered: bool) -> str:
        """Return the rule of all calls."""
        form = self._form
        begin, end = self._text(form.begin), self._text(form.end)
        if form.syntax in ("json", "python"):
            further = self._repeat(COMMA_CALL if form.uses_list else LINE_CALL, most - 1)
            calls = f'"[" ws call {further} ws "]"' if form.uses_list else "call"
            if form.syntax == "python" and not form.uses_list:
                calls = f"call {further}"
            inner = f"ws {calls} ws {end}" if end else f"ws {calls}"
            if form.uses_list or form.syntax == "python":
                return inner if is_triggered else f"{begin} {inner}"
            between = "ws" if begin else '"; "'
            return inner if is_triggered else f"{begin} {inner} {self._repeat(f'{between} {begin} {inner}', most - 1)}"
        call_begin = self._text(form.call_begin)
        if form.syntax == "harmony":
            return "call" if is_triggered else f"({self._text(HARMONY_START)})? {call_begin} call"
        one = f"{call_begin} call"
        if not begin:  # each call has a trigger of its own
            return "call" if is_triggered else f"{one} {self._repeat(f'ws {one}', most - 1)}"
        inner = f"ws {one} {self._repeat(f'ws {one}', most - 1)} ws {end}"
        section = f"{begin} {inner}"
        further = self._repeat(f"ws {section}", most - 1) if form.syntax == "parameters" else ""
        return inner if is_triggered else f"{section} {further}"

    @staticmethod
    def _repeat(what: str, most: int) -> str:
        return f"({what}){{0,{most}}}" if most > 0 else ""

    # -- one call

    def add_call(self, name: str, schema: Mapping[str, Any], *, is_strict: bool, may_be_any: bool) -> str:
        """Add the rule of the calls of one function, behind `call_begin`, and return its name.

        Args:
            name: of the function.
            schema: of its parameters.
            is_strict: raise NotInForm where a keyword of the schema would have no effect.
            may_be_any: take any arguments where the form cannot hold them to the schema.
        """
        before, rules, self.unenforced = self.unenforced, dict(self.rules), set()
        try:
            found = self._add_call(name, schema)
        except (NotInForm, LookupError):
            if is_strict or not may_be_any:
                raise
            self.rules, self.unenforced = rules, {"parameters"}
            found = self._add_call(name, None)
        if is_strict and self.unenforced:
            raise NotInForm("A keyword of a strict schema has no effect.")
        self.unenforced |= before
        return found

    def _add_call(self, name: str, schema: Mapping[str, Any] | None) -> str:
        """The rule of one function; without a schema any arguments will do."""
        form, number = self._form, len(self.rules)
        rule = f"call_{number}"
        self.rules[rule] = ""
        if form.syntax == "json":
            pair = f'{quote(quote(form.name_keys[0]))} ws ":" ws {quote(quote(name))}'
            is_own = form.id_keys != ("id",)
            before = f'{quote(quote(form.id_keys[0]))} ws ":" ws /"[0-9]{{1,3}}"/ ws "," ws ' if is_own else ""
            arguments = f'{quote(quote(form.argument_keys[0]))} ws ":" ws {self._json_rule(schema)}'
            body = f'"{{" ws {before}{pair} ws "," ws {arguments} ws "}}"'
        elif form.syntax == "parameters":
            parameters = self._add_any_parameters() if schema is None else self._add_parameters(schema)
            body = f"{self._text(name + form.name_end)} ws {parameters} {self._text(form.call_end)}"
        elif form.syntax == "python":
            keywords = self._add_any_keywords() if schema is None else self._add_keywords(schema)
            body = f'{quote(name + "(")} {keywords} ")"'
        else:
            call_end = f"ws {self._text(form.call_end)}" if form.call_end else ""
            body = f"{self._header(name)} {self._json_rule(schema)} {call_end}"
        self.rules[rule] = body
        return rule

    def _header(self, name: str) -> str:
        slots = {"{index}": "/[0-9]{1,2}/", "{id}": "/[A-Za-z0-9]{9}/"}
        headers = []
        for header in self._form.headers:
            parts = re.split(r"(\{index\}|\{id\})", header.replace("{name}", name))
            headers.append(" ".join(slots.get(part) or self._text(part) for part in parts if part))
        return f"({' | '.join(headers)})" if len(headers) > 1 else headers[0]

    def _add_parameters(self, schema: Mapping[str, Any]) -> str:
        found, types = [], TypeFinder(schema)
        self._followed, self._choices = (set(), set()), {}
        for key, part, is_required in list_arguments(schema):
            name = f"parameter_{len(self.rules)}"
            self.rules[name] = ""
            allowed = types.find(key)
            begin, kinds = self._form.key_begin + key, self._form.key_end_marks
            values = [self._parameter(begin + mark, kind, allowed, part, schema) for mark, kind in kinds]
            self.rules[name] = " | ".join(value for value in values if value)
            found.append(name if is_required else f"{name}?")
        return " ".join(found)

    def _parameter(
        self, begin: str, kind: KeyKind, types: JsonTypes | None, part: Any, schema: Mapping[str, Any]
    ) -> str:
        """The rule of a parameter that begins with these marks; "" if its schema does not fit the kind of its value."""
        form = self._form
        is_text = types is None or "string" in types
        if (kind == "text" and not is_text) or (kind == "json" and types == frozenset(("string",))):
            return ""
        begin = self._text(begin)
        begin += f" ws {self._text(form.value_begin)}" if form.value_begin else ""
        if not is_text or kind == "json":
            return f"{begin} ws {self._json_rule(extract_part(part, schema))} ws {self._text(form.value_end)} ws"
        choices = self._find_choices(part, schema)
        limits = list_limits(part, schema, self._followed[choices is None])
        if choices is None:
            self.unenforced |= limits
            return f"{begin} {self._text_rule()} ws"
        self.unenforced |= limits - {"const", "enum"}
        texts = ["null" if choice is None else choice for choice in choices if choice is not None or kind != "text"]
        self._spend(sum(map(len, texts)) + len(texts))
        padding = " | ".join(map(quote, form.value_padding))
        space = f"({padding})?" if padding else ""
        return f"{begin} {space} ({' | '.join(map(quote, texts))}) {space} {self._text(form.value_end)} ws"

    def _add_any_parameters(self) -> str:
        """Parameters of any names and values, in any number."""
        values = []
        for mark, kind in self._form.key_end_marks:
            begin = f"{self._text(self._form.key_begin)} {ANY_KEY} {self._text(mark)}"
            begin += f" ws {self._text(self._form.value_begin)}" if self._form.value_begin else ""
            value = f"ws {self._any_json()} ws {self._text(self._form.value_end)}"
            values.append(f"{begin} {value if kind == 'json' else self._text_rule()} ws")
        self.rules["any_parameter"] = " | ".join(values)
        return "any_parameter*"

    def _find_choices(self, part: Any, schema: Mapping[str, Any]) -> Sequence[str | None] | None:
        """As `list_choices`, once for what a reference names, which may have many spellings."""
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        if not isinstance(reference, str):
            return list_choices(part, schema)
        target = find_referenced(reference, schema)
        if id(target) not in self._choices:
            self._choices[id(target)] = list_choices(target, schema)
        return self._choices[id(target)]

    def _text_rule(self) -> str:
        """Any text up to the mark after a value, and the mark."""
        mark = self._form.value_end
        token = self._tokens.search(mark)
        if token is None:
            self.rules["text[lazy]"] = f"/(.|\\n)*{_escape(mark)}/"
            return "text"
        self.rules["text"] = f"/(.|\\n)*{_escape(mark[: token.start()])}/"
        return f"text {self._text(mark[token.start() :])}"

    def _add_keywords(self, schema: Mapping[str, Any]) -> str:
        """`key=value` in the order of the schema, with commas between those that are there."""
        first, later = '""', '""'  # what may follow without and with a keyword before
        for key, part, is_required in reversed(list_arguments(schema)):
            one = f"{quote(key + '=')} {self._json_rule(extract_part(part, schema))}"
            name = f"keyword_{len(self.rules)}"
            self.rules[name] = f"{one} {later}" + ("" if is_required else f" | {first}")
            first = name
            name = f"keyword_{len(self.rules)}"
            self.rules[name] = f'", " {one} {later}' + ("" if is_required else f" | {later}")
            later = name
        return first

    def _add_any_keywords(self) -> str:
        self.rules["any_keyword"] = f'{ANY_KEYWORD} "=" {self._any_json()}'
        return '(any_keyword (", " any_keyword)*)?'

    # -- texts and schemas

    def _any_json(self) -> str:
        if "any_json" not in self.rules:
            self.rules["any_json"] = "%json {}"
        return "any_json"

    def _text(self, text: str) -> str:
        """A text in Lark: special tokens by their ids, all else quoted."""
        parts, at = [], 0
        for found in self._tokens.finditer(text):
            parts += [quote(text[at : found.start()])] if found.start() > at else []
            parts.append(f"<[{self._special[found.group()]}]>")
            at = found.end()
        parts += [quote(text[at:])] if at < len(text) else []
        return " ".join(parts)

    def _json_rule(self, schema: Any) -> str:
        name = f"json_{len(self.rules)}"
        if self._options and isinstance(schema, Mapping):
            schema = {**schema, "x-guidance": dict(self._options)}
        text = json.dumps(schema)
        self._spend(len(text))
        self.rules[name] = f"%json {text}"
        return name

    def _spend(self, length: int) -> None:
        """Count what a schema adds to the grammar."""
        self._left -= length
        if self._left < 0:
            raise _TooLong


def _escape(text: str) -> str:
    """A text inside of a regular expression of Lark."""
    return re.sub(r"([\\^$.|?*+()\[\]{}/])", r"\\\1", text).replace("\n", r"\n")
