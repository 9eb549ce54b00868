"""Reads calls that are written as Python, `[name(key=value), ...]`, and writes their arguments as JSON."""

from __future__ import annotations

import re

from inferplane.dialogue.replies.calls import CallWriter
from inferplane.dialogue.replies.forms import NAME_CHARACTERS, ToolForm
from inferplane.dialogue.replies.json_calls import read_end
from inferplane.dialogue.replies.reader import SPACE, Emit, NotACall, Steps, TextEnded, TextReader
from inferplane.dialogue.replies.values import convert_python, quote

MAX_KEY = 64
"""Most characters of a parameter's name."""
MAX_DEPTH = 64
"""Most lists and mappings inside each other."""
_KEY = re.compile(r"\w+")
_NAME = re.compile(NAME_CHARACTERS + "+")
_STRING = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_SCALAR = re.compile(r"[^,()\[\]{}:\"'\n]*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HIGH_SURROGATE = re.compile(r"[dD][89abAB][0-9a-fA-F]{2}")
_PAIR = re.compile(_HIGH_SURROGATE.pattern + r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_PAIR_LENGTH = len("d83d" + "\\ude00")
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def read_python_calls(reader: TextReader, form: ToolForm, calls: CallWriter) -> Steps[None]:
    """Read calls in Python's syntax, in brackets or one after the other, and the mark after them."""
    yield from reader.skip(SPACE)
    is_list = bool((yield from reader.match("[")))
    while True:
        yield from reader.skip(SPACE)
        name, mark = yield from reader.read_to(calls.max_name + len(SPACE), "(")
        if not mark:
            raise TextEnded
        calls.announce(name.strip())
        yield from _read_arguments(reader, calls)
        yield from reader.skip(SPACE)
        if is_list:
            if (yield from reader.match("]", is_expected=True)):
                reader.record()
                break
            yield from reader.expect(",")
        elif not form.end or (yield from reader.is_at(form.end)):
            break
    yield from read_end(reader, form.end)


def _read_arguments(reader: TextReader, calls: CallWriter) -> Steps[None]:
    """Read `key=value, ...)`."""
    is_first = True
    while True:
        yield from reader.skip(SPACE)
        if not (yield from reader.match(")")):
            key, mark = yield from reader.read_to(MAX_KEY, "=")
            if not _KEY.fullmatch(key.strip()) and (mark or key.strip()):
                raise NotACall
            if not mark:
                if key and not is_first:
                    calls.write(", " + quote(key.strip())[:-1])
                raise TextEnded
            if is_first:
                calls.begin()
            calls.write(("{" if is_first else ", ") + quote(key.strip()) + ": ")
            is_first = False
            reader.stop_record()
            yield from reader.skip(SPACE)
            yield from _copy_value(reader, calls.write, 0)
            reader.record()
            yield from reader.skip(SPACE)
            if (yield from reader.match(",")):
                continue
            yield from reader.expect(")")
        if is_first:
            calls.begin()
        calls.write("{}" if is_first else "}")
        calls.finish()
        return


def _copy_value(reader: TextReader, write: Emit, depth: int) -> Steps[None]:
    character = yield from reader.next_character()
    if not character:
        raise TextEnded
    if character in _STRING:
        yield from _copy_string(reader, write)
    elif character in _CLOSING and depth < MAX_DEPTH:
        yield from _copy_group(reader, write, depth)
    else:
        found: list[str] = []
        yield from reader.copy_run(_SCALAR, found.append)
        write(convert_python("".join(found).strip()))


def _copy_group(reader: TextReader, write: Emit, depth: int) -> Steps[None]:
    """A list, a tuple or a mapping."""
    opening = yield from reader.take(1)
    is_mapping, closing = opening == "{", _CLOSING[opening]
    write("{" if is_mapping else "[")
    is_first = True
    while True:
        yield from reader.skip(SPACE)
        if not (yield from reader.next_character()):
            raise TextEnded
        if (yield from reader.match(closing)):
            write("}" if is_mapping else "]")
            return
        write("" if is_first else ", ")
        is_first = False
        if is_mapping:
            key: list[str] = []
            yield from _copy_value(reader, key.append, MAX_DEPTH)
            write(_as_key("".join(key)) + ": ")
            yield from reader.skip(SPACE)
            yield from reader.expect(":")
            yield from reader.skip(SPACE)
        yield from _copy_value(reader, write, depth + 1)
        yield from reader.skip(SPACE)
        if not (yield from reader.match(",")) and not (yield from reader.is_at(closing)):
            raise NotACall


def _as_key(text: str) -> str:
    return text if text.startswith('"') else quote(text)


def _copy_string(reader: TextReader, write: Emit) -> Steps[None]:
    mark = yield from reader.take(1)
    write('"')
    while True:
        yield from reader.copy_run(_STRING[mark], lambda piece: write(quote(piece)[1:-1]))
        character = yield from reader.next_character()
        if not character:
            raise TextEnded
        yield from reader.take(1)
        if character == mark:
            write('"')
            return
        kind = yield from reader.take(1)
        if kind in _HEX_DIGITS:
            digits = yield from reader.ahead(_HEX_DIGITS[kind])
            if kind == "u" and _HIGH_SURROGATE.fullmatch(digits):
                pair = yield from reader.ahead(_PAIR_LENGTH)
                digits = pair if _PAIR.fullmatch(pair) else digits
            text = _decode(digits) if len(digits) >= _HEX_DIGITS[kind] else ""
            if text:
                yield from reader.take(len(digits))
            write(quote(text or "\\" + kind)[1:-1])
        else:
            write(quote(_ESCAPES.get(kind, kind if kind in "\\'\"/" else "\\" + kind))[1:-1])


def _decode(digits: str) -> str:
    """The character with this number in hexadecimal digits, or with these two halves in UTF-16; "" if there is none."""
    first, _, second = digits.partition("\\u")
    try:
        number = int(first, 16)
        if second:
            number = 0x10000 + ((number - 0xD800) << 10) + int(second, 16) - 0xDC00
    except ValueError:
        return ""
    return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else ""
