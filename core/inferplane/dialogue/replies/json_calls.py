"""Reads calls whose arguments are written as JSON: objects with name and arguments, and names followed by arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from inferplane.dialogue.replies.calls import CallWriter
from inferplane.dialogue.replies.forms import ToolForm
from inferplane.dialogue.replies.reader import SPACE, Emit, NotACall, Steps, TextEnded, TextReader

MAX_KEY = 64
"""Most characters of a key of a call's object, and of an id."""
MAX_HEADER = 96
"""Most characters of a header beside the name."""
_PLAIN = re.compile(r'[^"{}\[\]]*')
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_DECODED = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r'[^\s,}\]"{\[]*')
_PAIRS = {"}": "{", "]": "["}


def read_json_calls(reader: TextReader, form: ToolForm, calls: CallWriter) -> Steps[None]:
    """Read an object with name and arguments, several of them, or a list of them, and the mark after it."""
    yield from reader.skip(SPACE)
    is_list = bool((yield from reader.match("[")))
    while True:
        yield from reader.skip(SPACE)
        yield from _read_object(reader, form, calls)
        yield from reader.skip(SPACE)
        if is_list:
            if (yield from reader.match("]", is_expected=True)):
                reader.record()
                break
            yield from reader.expect(",")
        elif not ((yield from reader.match(";", ",")) or (yield from reader.next_character()) == "{"):
            break
    yield from read_end(reader, form.end)


def read_end(reader: TextReader, mark: str) -> Steps[None]:
    """Read the mark after calls if it is there, with the white space before it."""
    yield from reader.skip(SPACE)
    if mark and (yield from reader.match(mark, is_expected=True)):
        reader.record()


def _read_object(reader: TextReader, form: ToolForm, calls: CallWriter) -> Steps[None]:
    yield from reader.expect("{")
    name, call_id, depth, is_written = "", "", 1, False
    early: list[str] | None = None  # arguments that come before the name
    while True:
        yield from reader.skip(SPACE)
        if (yield from reader.match("}")):
            depth -= 1
        else:
            key = yield from _read_string(reader, MAX_KEY)
            yield from reader.skip(SPACE)
            yield from reader.expect(":")
            yield from reader.skip(SPACE)
            if key == "function" and (yield from reader.match("{")):
                depth += 1  # OpenAI's form of a call has name and arguments in an object of their own
                continue
            if key in form.name_keys and not name:
                name = yield from _read_string(reader, calls.max_name)
                calls.announce(name, call_id)
                if early is not None:
                    _write_call(calls, early)
                    is_written = True
            elif key in form.argument_keys and early is None and not is_written:
                if name:
                    yield from copy_arguments(reader, calls.begin, calls.write)
                    calls.finish()
                    is_written = True
                else:
                    early = []
                    yield from copy_arguments(reader, lambda: None, early.append)
            elif key in (*form.id_keys, "type", "index"):
                value = yield from _read_scalar(reader)
                call_id = value if key in form.id_keys else call_id
            else:
                raise NotACall
        if not depth:
            break
        yield from reader.skip(SPACE)
        if not (yield from reader.match(",")) and (yield from reader.next_character()) != "}":
            raise NotACall if (yield from reader.next_character()) else TextEnded
    if not is_written:
        if not name:
            raise NotACall
        _write_call(calls, ["{}"])
    reader.record()


def _write_call(calls: CallWriter, arguments: list[str]) -> None:
    calls.begin()
    calls.write("".join(arguments))
    calls.finish()


def _read_string(reader: TextReader, most: int) -> Steps[str]:
    yield from reader.expect('"')
    text, mark = yield from reader.read_to(most, '"')
    if not mark:
        raise TextEnded
    if "\\" in text:
        raise NotACall
    return text


def _read_scalar(reader: TextReader) -> Steps[str]:
    """A string, a number or a word, as text."""
    if (yield from reader.next_character()) == '"':
        return (yield from _read_string(reader, MAX_KEY))
    found: list[str] = []
    yield from reader.copy_run(_SCALAR, found.append)
    if not (yield from reader.next_character()):
        raise TextEnded
    if not found:
        raise NotACall
    return "".join(found)


def copy_arguments(reader: TextReader, begin: Callable[[], object], write: Emit) -> Steps[None]:
    """Read a JSON object, or a string that contains one, and pass it on as it comes.

    Args:
        reader: is where the arguments begin.
        begin: called once the arguments have begun as an object does.
        write: takes the pieces.

    Raises:
        NotACall: they do not begin so.
    """
    if (yield from reader.match('"')):
        yield from _copy_decoded(reader, begin, write)
        return
    yield from reader.expect("{")
    space = yield from reader.skip(SPACE)
    following = yield from reader.next_character()
    if following not in ('"', "}"):
        raise NotACall if following else TextEnded
    begin()
    write("{" + space)
    yield from copy_json(reader, write, "{")


def copy_json(reader: TextReader, write: Emit, opened: str = "") -> Steps[bool]:
    """Read JSON that begins with a bracket up to the bracket that closes it, and pass it on as it comes.

    Args:
        reader: is at the first bracket, or after those in `opened`.
        write: takes the pieces.
        opened: brackets that are open.

    Returns:
        Whether it is complete. It is not if the text ends, or if a bracket closes what is not open.
    """
    stack = list(opened)
    while True:
        yield from reader.copy_run(_PLAIN, write)
        character = yield from reader.next_character()
        if not character:
            return False
        if character in _PAIRS and (not stack or stack[-1] != _PAIRS[character]):
            return False
        write((yield from reader.take(1)))
        if character == '"':
            if not (yield from _copy_string(reader, write)):
                return False
        elif character in _PAIRS:
            stack.pop()
            if not stack:
                return True
        else:
            stack.append(character)


def _copy_string(reader: TextReader, write: Emit) -> Steps[bool]:
    """Read a JSON string after its quote. Line ends and the like, which JSON demands as escapes, become such."""
    while True:
        yield from reader.copy_run(_IN_STRING, write)
        character = yield from reader.next_character()
        if not character:
            return False
        yield from reader.take(1)
        if character == '"':
            write(character)
            return True
        if character != "\\":
            write(json.dumps(character)[1:-1])
            continue
        write(character)
        if not (yield from reader.next_character()):
            return False
        write((yield from reader.take(1)))


def _copy_decoded(reader: TextReader, begin: Callable[[], object], write: Emit) -> Steps[None]:
    """Read a JSON string after its quote, and pass on what it says, which has to begin as an object does."""
    while True:
        yield from reader.skip(SPACE)
        character = yield from reader.next_character()
        if character == "{":
            break
        if character != "\\":
            raise NotACall if character else TextEnded
        if not (yield from _read_escape(reader)).isspace():
            raise NotACall
    begin()
    while True:
        yield from reader.copy_run(_DECODED, write)
        character = yield from reader.next_character()
        if character != "\\":
            if character:
                yield from reader.take(1)
            return
        write((yield from _read_escape(reader)))


def _read_escape(reader: TextReader) -> Steps[str]:
    """Read an escape of a JSON string, or two that are one character. What is none is returned as it is."""
    there = yield from reader.ahead(2)
    count = 2
    if there == "\\u":
        there, count = (yield from reader.ahead(6)), 6
        if there[2:4].lower() in ("d8", "d9", "da", "db") and (yield from reader.ahead(8))[6:] == "\\u":
            there, count = (yield from reader.ahead(12)), 12
    yield from reader.take(min(len(there), count))
    try:
        return str(json.loads(f'"{there}"')).encode("utf-8", "replace").decode("utf-8")
    except ValueError:
        return there


def read_named_calls(reader: TextReader, form: ToolForm, calls: CallWriter) -> Steps[None]:
    """Read calls whose name is in a header before the arguments, and the mark after them."""
    is_first = True
    while True:
        yield from reader.skip(SPACE)
        if form.begin and not (yield from reader.match(form.call_begin)) and form.call_begin:
            if is_first:
                raise NotACall if (yield from reader.next_character()) else TextEnded
            break
        header, mark = yield from reader.read_to(calls.max_name + MAX_HEADER, "{", reads_mark=False)
        if not mark:
            raise TextEnded
        announce_header(header, form, calls)
        yield from copy_arguments(reader, calls.begin, calls.write)
        calls.finish()
        yield from read_end(reader, form.call_end)
        is_first = False
        if not (form.begin and form.call_begin):
            break
    yield from read_end(reader, form.end)


def announce_header(header: str, form: ToolForm, calls: CallWriter) -> None:
    """Announce the call that a header names; raise NotACall if it has none of the form's headers."""
    found = next((match for p in form.header_patterns if (match := p.fullmatch(header))), None)
    if found is None:
        raise NotACall
    groups = found.groupdict()
    calls.announce(groups["name"], form.id_form.format(**groups) if form.id_form else groups.get("id") or "")
