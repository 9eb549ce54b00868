"""JSON in files that nobody vouches for: regular files of a bounded size, scanned without building more than is wanted.

A parser for any JSON takes twenty times a text's memory for a text of empty lists. A scanner that knows what must come
next takes none, and can say where it did not. It sees UTF-8 as one character a byte: what JSON is built from is ASCII,
and one character beyond makes a Python string of all the rest four times as large.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from contextlib import contextmanager
from json.decoder import scanstring  # type: ignore[attr-defined]  # what the json module reads its own strings with
from pathlib import Path

from inferplane.errors import CheckpointError
from inferplane.files import AGAIN, file_size

MOST_SKIPPED = 10_000
"""Values that are passed over in one text; metadata hold a handful."""
MOST_DEPTH = 16
MOST_NAME = 1024
"""Bytes of a string that is asked for; published names of tensors have at most 150. Messages quote them."""

_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"-?[0-9][0-9.eE+-]{0,40}|true|false|null")
_SIZES = re.compile(r"\[([0-9, \t\r\n]{0,400})\]")
_SIZE = re.compile(r"0|[1-9][0-9]{0,18}")
_PLAIN = re.compile(rf'[ \t\r\n]*"([^"\\\x00-\x1f]{{0,{MOST_NAME}}})"')
_STRING = re.compile(rf'"(?:[^"\\]|\\.){{0,{MOST_NAME}}}"', re.DOTALL)
_PART = re.compile(r'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}){1,1000}')
_SHOWN = 64
_PIECE_BYTES = 2**20


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the system refuses inside is a CheckpointError about this file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}.",
            remedy="allow this user to read it, or fetch the file again",
        ) from error


def read_text(path: Path, limit_bytes: int) -> str:
    """A file's text, UTF-8.

    Raises:
        CheckpointError: it is no regular file, larger than `limit_bytes`, or no UTF-8.
    """
    try:
        return _content(path, limit_bytes).decode()
    except UnicodeDecodeError as error:
        raise _no_text(path, error) from error


def read_scan(path: Path, limit_bytes: int) -> Scan:
    """A scan of a file's text, from its beginning.

    Raises:
        CheckpointError: as `read_text`.
    """
    try:
        return Scan(_content(path, limit_bytes))
    except UnicodeDecodeError as error:
        raise _no_text(path, error) from error


def _content(path: Path, limit_bytes: int) -> bytes:
    size = file_size(path)
    if size > limit_bytes:
        raise CheckpointError(f"{path} has {size} bytes; at most {limit_bytes} are read.", remedy=AGAIN)
    with reading(path):
        return path.read_bytes()


def _no_text(path: Path, error: UnicodeDecodeError) -> CheckpointError:
    return CheckpointError(f"{path} is not valid JSON: it is not UTF-8 text ({error}).", remedy=AGAIN)


class Scan:
    """A place in a JSON text that moves forward. Every method raises ValueError when something else comes next.

    Args:
        raw: the text, UTF-8.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """

    def __init__(self, raw: bytes) -> None:
        if not raw.isascii():
            decoder = codecs.getincrementaldecoder("utf-8")()
            for start in range(0, len(raw), _PIECE_BYTES):
                decoder.decode(raw[start : start + _PIECE_BYTES])
            decoder.decode(b"", True)
        self.text, self.at, self.skipped = raw.decode("latin-1"), 0, 0

    def next(self, characters: str) -> str:
        """Pass over one of these characters."""
        found = self.text[self.at : self.at + 1]
        if found in " \t\r\n":
            found = self.peek()
        if not found or found not in characters:
            raise ValueError(f"{' or '.join(characters)} expected at byte {self.at}, found {found!r}")
        self.at += 1
        return found

    def string(self) -> str:
        """A string's value."""
        if plain := _PLAIN.match(self.text, self.at):
            self.at = plain.end()
            return plain[1] if plain[1].isascii() else plain[1].encode("latin-1").decode()
        self.next('"')
        found = _STRING.match(self.text, self.at - 1)
        if found is None:
            raise ValueError(f"the string at byte {self.at - 1} does not end within {MOST_NAME} characters")
        value: str = scanstring(found[0].encode("latin-1").decode(), 1, True)[0]
        self.at = found.end()
        return value

    def _skip_string(self) -> None:
        """Pass over a string of any length; it is not built."""
        self.next('"')
        while found := _PART.match(self.text, self.at):
            self.at = found.end()
        if self.text[self.at : self.at + 1] != '"':
            raise ValueError(f"a string has no end, or a bad escape or control character, at byte {self.at}")
        self.at += 1

    def members(self) -> Iterator[str]:
        """The keys of an object; whoever iterates takes each value before the next key."""
        self.next("{")
        if self.peek() == "}":
            self.at += 1
            return
        while True:
            key = self.string()
            self.next(":")
            yield key
            if self.next(",}") == "}":
                return

    def sizes(self) -> tuple[int, ...]:
        """A list of integers from 0."""
        self._space()
        found = _SIZES.match(self.text, self.at)
        parts = found[1].split(",") if found and found[1].strip() else []
        if found is None or not all(_SIZE.fullmatch(part.strip()) for part in parts):
            raise ValueError(f"a list of sizes expected at byte {self.at}")
        self.at = found.end()
        return tuple(map(int, parts))

    def skip(self, depth: int = 0) -> str:
        """Pass over any value; how its text begins, all of it for numbers."""
        self._space()
        before = self.at
        self._skip(depth)
        return self.text[before : min(self.at, before + _SHOWN)]

    def _skip(self, depth: int) -> None:
        self.skipped += 1
        if self.skipped > MOST_SKIPPED or depth > MOST_DEPTH:
            raise ValueError(f"more than {MOST_SKIPPED} values, or {MOST_DEPTH} levels, beside what is asked for")
        start = self.peek()
        if start == '"':
            self._skip_string()
        elif start == "{":
            for _ in self.members():
                self._skip(depth + 1)
        elif start == "[":
            self.at += 1
            if self.peek() == "]":
                self.at += 1
                return
            self._skip(depth + 1)
            while self.next(",]") == ",":
                self._skip(depth + 1)
        elif found := _SCALAR.match(self.text, self.at):
            self.at = found.end()
        else:
            raise ValueError(f"a value expected at byte {self.at}, found {start!r}")

    def end(self) -> None:
        """Nothing but space may follow."""
        self._space()
        if self.at != len(self.text):
            raise ValueError(f"the text goes on behind its end at byte {self.at}")

    def _space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def peek(self) -> str:
        """The character that comes next, "" at the end."""
        self._space()
        return self.text[self.at : self.at + 1]
