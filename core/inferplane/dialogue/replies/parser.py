"""Parses a reply as it is generated: what is reasoning, content, and calls.

Nothing is lost: each character of the text is in one event, or belongs to a mark or to white space beside one. A call
of an unknown function and a call that does not begin as its form demands are content, marks included. A call that has
begun stays one: what is wrong later on is in its arguments, or is content after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from inferplane.dialogue.replies.calls import MAX_CALLS, CallWriter
from inferplane.dialogue.replies.events import Content, Event, Reasoning, join_events
from inferplane.dialogue.replies.forms import ReplyForm, Syntax, ToolForm
from inferplane.dialogue.replies.harmony import read_harmony
from inferplane.dialogue.replies.json_calls import read_end, read_json_calls, read_named_calls
from inferplane.dialogue.replies.parameter_calls import read_parameter_calls
from inferplane.dialogue.replies.python_calls import read_python_calls
from inferplane.dialogue.replies.reader import SPACE, Marks, NotACall, Steps, TextEnded, TextReader

Mode = Literal["none", "auto", "required", "named"]
"""Whether a reply has calls, as `tool_choice` says: none; perhaps; certainly; certainly of one function."""
MAX_PADDING = 16
"""Most characters of white space before the end of a thought that belong to its mark."""
_READERS: dict[Syntax, Callable[[TextReader, ToolForm, CallWriter], Steps[None]]] = {
    "json": read_json_calls,
    "named_json": read_named_calls,
    "parameters": read_parameter_calls,
    "python": read_python_calls,
}


class ReplyParser:
    """Parses one reply. Not for several threads at once.

    Args:
        form: how the model writes.
        tools: name -> JSON schema of the parameters, of the functions that may be called.
        reasoning_is_open: the prompt has begun the thought; see `ReasoningForm.is_open_after`.
        mode: whether the reply has calls. In "required" and "named" the beginning of a call that the end of the text
            cuts off is no content.
        max_calls: most calls; others are left out.
        keeps_marks: the marks around a thought, and white space beside them, are part of it.
    """

    def __init__(
        self,
        form: ReplyForm,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        reasoning_is_open: bool = False,
        mode: Mode = "auto",
        max_calls: int = MAX_CALLS,
        keeps_marks: bool = False,
    ) -> None:
        self._keeps_marks = keeps_marks
        self._reader = TextReader()
        self._events: list[Event] = []
        self._reasoning = form.reasoning
        self._is_forced = mode in ("required", "named")
        known = tools or {}
        self._tools = form.tools if mode != "none" and known else ()
        self._triggers = tuple(form.trigger for form in self._tools if form.trigger)
        self._calls = CallWriter(self._reader, known, self._events.append, max_calls)
        self._has_answer_mark = False
        self._steps = (
            self._read_harmony(form, reasoning_is_open) if form.uses_channels else self._read(reasoning_is_open)
        )

    @property
    def num_calls(self) -> int:
        """Calls that have ended so far; those that were left out among them."""
        return self._calls.count

    def feed(self, text: str) -> list[Event]:
        """Add text, and return the events of what is certain by now."""
        self._reader.feed(text)
        return self._advance()

    def end(self) -> list[Event]:
        """End the text, and return the events of what was not certain before."""
        self._reader.is_ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        found = join_events(self._events)
        self._events.clear()
        return found

    def _write_reasoning(self, text: str) -> None:
        self._events.append(Reasoning(text))

    def _write_content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    # -- a reply

    def _read_harmony(self, form: ReplyForm, is_open: bool) -> Steps[None]:
        write = self._write_reasoning if form.reasoning else self._write_content
        try:
            yield from read_harmony(self._reader, self._calls, write, is_open, bool(self._tools))
        except TextEnded:
            self._end_call(self._write_content)

    def _read(self, is_open: bool) -> Steps[None]:
        before = yield from self._read_thoughts(is_open)
        if self._reasoning and (yield from self._reader.match(self._reasoning.answer_begin)):
            before, self._has_answer_mark = "", True
            yield from self._reader.skip(self._reasoning.padding)
        before += yield from self._reader.skip(SPACE)
        labels = [form.answer_label for form in self._tools if form.answer_label]
        if labels and (yield from self._reader.match(*labels)):
            before = ""
        before = yield from self._read_bare_calls(before)
        yield from self._read_answer(before)

    def _read_thoughts(self, is_open: bool) -> Steps[str]:
        """Read all thoughts before the answer, and return the white space that is part of the answer."""
        form, reader = self._reasoning, self._reader
        if form is None:
            return ""
        triggers = self._triggers if form.ended_by_calls else ()
        end_marks = Marks((*form.end_marks, *triggers), form.padding, MAX_PADDING)
        while True:
            reader.record()
            yield from reader.skip(SPACE)
            if not (yield from reader.match(*form.begin_marks)) and not is_open:
                return reader.stop_record()
            before = reader.stop_record()
            if is_open and not self._keeps_marks:
                self._write_open(before)
            is_open = False
            self._write_mark(before + (yield from reader.skip(form.padding)))
            padding, mark = yield from reader.copy_until(end_marks, self._write_reasoning)
            while mark in triggers:
                count, forms = self._calls.count, [form for form in self._tools if form.trigger == mark]
                before = yield from self._read_calls(padding, forms, mark, self._write_reasoning)
                if self._calls.count > count:
                    if end := (yield from reader.match(*form.end_marks)):
                        self._write_mark(before + end + (yield from reader.skip(form.padding)))
                        return ""
                    return before
                self._write_reasoning(before)
                padding, mark = yield from reader.copy_until(end_marks, self._write_reasoning)
            if not mark:
                return ""
            self._write_mark(padding + mark + (yield from reader.skip(form.padding)))

    def _write_mark(self, text: str) -> None:
        if self._keeps_marks and text:
            self._write_reasoning(text)

    def _write_open(self, before: str) -> None:
        """Write white space at the beginning of a thought that the prompt began."""
        assert self._reasoning is not None
        if before.isspace() and (text := before.lstrip(self._reasoning.padding)):
            self._write_reasoning(text)

    def _read_bare_calls(self, before: str) -> Steps[str]:
        """Read calls that have no mark, where an answer begins. Returns the text before what comes next."""
        bare = [form for form in self._tools if not form.trigger]
        if not bare or (yield from self._reader.next_character()) not in ("{", "["):
            return before
        if (yield from self._reader.is_at(*self._triggers, is_expected=False)):
            return before
        return (yield from self._read_calls(before, bare))

    def _read_answer(self, before: str) -> Steps[None]:
        """Read content, and calls between marks.

        Args:
            before: white space that has been read; it is content unless a call or the end follows it.
        """
        reader, form = self._reader, self._reasoning
        answer_end = form.answer_end if form and self._has_answer_mark else ""
        separator = max([len(form.separator) for form in self._tools] + [bool(answer_end)])
        marks = Marks((*self._triggers, answer_end), "\n", separator)
        while True:
            held = [before]

            def write(text: str, held: list[str] = held) -> None:
                self._write_content("".join(held) + text)
                held.clear()

            padding, mark = yield from reader.copy_until(marks, write)
            if not mark:
                return
            before = "".join(held)
            if mark == answer_end:
                before += padding + mark + (yield from reader.skip(SPACE))
                if not (yield from reader.next_character()) or (yield from reader.is_at(*self._triggers)):
                    before = ""
                continue
            forms = [form for form in self._tools if form.trigger == mark]
            before = yield from self._read_calls(before + padding, forms, mark)

    # -- calls

    def _read_calls(
        self, before: str, forms: list[ToolForm], mark: str = "", write: Callable[[str], None] | None = None
    ) -> Steps[str]:
        """Read calls after their mark, or what turns out to be none, which is given to `write`: content, unless another
        is stated.

        Returns:
            White space after the calls, which is content unless a call or the end follows it.
        """
        reader, write = self._reader, write or self._write_content
        reader.record(before + mark)
        count, form = self._calls.count, forms[0]
        try:
            form = yield from self._choose(forms)
            yield from _READERS[form.syntax](reader, form, self._calls)
            yield from reader.skip(SPACE)
        except NotACall:
            self._calls.abandon()
            text = reader.stop_record()
            if self._calls.count > count and not text.strip():
                reader.record(text)
                yield from read_end(reader, form.end)
                yield from reader.skip(SPACE)
                return reader.stop_record()
            write(text)
        except TextEnded:
            self._end_call(write)
        return reader.stop_record()

    def _choose(self, forms: list[ToolForm]) -> Steps[ToolForm]:
        """The one of several forms with the same mark that what follows the mark is in."""
        if len(forms) == 1:
            return forms[0]
        yield from self._reader.skip(SPACE)
        start = yield from self._reader.ahead(1)
        while start.strip() in ("[", "") and len(start) < MAX_PADDING:
            longer = yield from self._reader.ahead(len(start) + 1)
            if longer == start:
                raise TextEnded
            start = longer
        for form in forms:
            if _may_be_in(form, start[0], start[-1]):
                return form
        raise NotACall

    def _end_call(self, write: Callable[[str], None]) -> None:
        """The text ended inside of a call, or in the marks around it: `write` gets what is no call."""
        text = self._reader.stop_record()
        if self._is_forced and self._calls.announced is not None:
            self._calls.begin()
        if self._is_forced:
            self._reader.drop_rest()
        elif not self._calls.is_open and text.strip():
            write(text)


def _may_be_in(form: ToolForm, first: str, second: str) -> bool:
    """Whether calls in a form may begin with a character, and another after a bracket."""
    if form.syntax == "json":
        return first == "{" or (first == "[" and second == "{")
    if form.syntax == "python":
        return first not in "{[<" or (first == "[" and second not in "{[")
    begin = form.call_begin if form.begin else ""
    return first == begin[0] if begin else first not in "{[<"
