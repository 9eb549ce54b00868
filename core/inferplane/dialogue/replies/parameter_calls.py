"""Reads calls whose arguments stand one by one between marks, and writes them as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.dialogue.replies.calls import CallWriter
from inferplane.dialogue.replies.forms import KeyKind, ToolForm
from inferplane.dialogue.replies.json_calls import read_end
from inferplane.dialogue.replies.reader import SPACE, Marks, NotACall, Steps, TextEnded, TextReader
from inferplane.dialogue.replies.values import JsonTypes, TypeFinder, convert_value, quote

MAX_KEY = 256
"""Most characters of a parameter's name."""


def read_parameter_calls(reader: TextReader, form: ToolForm, calls: CallWriter) -> Steps[None]:
    """Read calls whose arguments stand between marks, and the mark after them."""
    is_first = True
    while True:
        yield from reader.skip(SPACE)
        if form.begin and not (yield from reader.match(form.call_begin)):
            if is_first:
                raise NotACall if (yield from reader.next_character()) else TextEnded
            break
        stops = (form.name_end,) if form.name_end else (form.key_begin, form.call_end)
        header, mark = yield from reader.read_to(calls.max_name + len(SPACE), *stops, reads_mark=bool(form.name_end))
        if not mark:
            raise TextEnded
        name = header.strip()
        calls.announce(name)
        calls.begin()
        calls.write("{")
        if not (yield from _read_parameters(reader, form, calls, TypeFinder(calls.tools[name]))):
            return
        is_first = False
        if not form.begin:
            break
    yield from read_end(reader, form.end)


def _read_parameters(reader: TextReader, form: ToolForm, calls: CallWriter, finder: TypeFinder) -> Steps[bool]:
    """Read a call from behind its name. Returns whether another call may follow."""
    call_marks = Marks((form.key_begin, form.call_end, form.end))
    is_first = True
    while True:
        reader.record()
        yield from reader.skip(SPACE)
        mark = yield from reader.match(form.key_begin, form.call_end, form.end, is_expected=True)
        if not mark and (yield from reader.next_character()):  # what is no parameter is content
            calls.write_content(reader.stop_record())
            _, mark = yield from reader.copy_until(call_marks, calls.write_content)
        if not mark:
            raise TextEnded
        if mark != form.key_begin:
            calls.write("}")
            calls.finish()
            return mark == form.call_end
        reader.stop_record()
        yield from _read_parameter(reader, form, calls, finder, "" if is_first else ", ")
        is_first = False


def _read_parameter(
    reader: TextReader, form: ToolForm, calls: CallWriter, finder: TypeFinder, before: str
) -> Steps[None]:
    kinds: Mapping[str, KeyKind] = dict(form.key_end_marks)
    reader.record()
    key, mark = yield from reader.read_to(MAX_KEY, *kinds)
    reader.stop_record()
    key = key.strip()
    if not mark:
        if key:
            calls.write(before + quote(key)[:-1])
        raise TextEnded
    calls.write(f"{before}{quote(key)}: ")
    types = finder.find(key) if kinds[mark] == "schema" else None
    is_text = kinds[mark] == "text" or types == frozenset(("string",))
    if form.value_begin:
        yield from reader.skip(SPACE)
        yield from reader.match(form.value_begin, is_expected=True)
    if (yield from reader.next_character()) in (form.value_padding or "\0"):
        yield from reader.take(1)
    if is_text:
        calls.write('"')
        is_complete = yield from _copy_value(reader, form, lambda piece: calls.write(quote(piece)[1:-1]))
        calls.write('"' if is_complete else "")
    else:
        pieces: list[str] = []
        is_complete = yield from _copy_value(reader, form, pieces.append)
        calls.write(_convert("".join(pieces), types, is_complete))
    if not is_complete:
        raise TextEnded


def _convert(text: str, types: JsonTypes | None, is_complete: bool) -> str:
    if is_complete:
        return convert_value(text, types)
    return text if text.lstrip()[:1] in ("[", "{") else quote(text)[:-1]  # cut off, as far as it came


def _copy_value(reader: TextReader, form: ToolForm, emit: Any) -> Steps[bool]:
    """Read a value up to its mark, and pass it on. The mark is part of the value if no parameter or end follows it.

    Returns:
        Whether the value is complete.
    """
    end_marks = Marks((form.value_end,), form.value_padding, 1)
    following = tuple(filter(None, (form.key_begin, form.call_end, form.end)))
    while True:
        padding, mark = yield from reader.copy_until(end_marks, emit)
        if not mark:
            return False
        space = yield from reader.skip(SPACE)
        if (yield from reader.is_at(*following)):
            return True
        emit(padding + mark + space)
