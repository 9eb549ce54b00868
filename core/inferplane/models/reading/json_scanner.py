"""Scans JSON from untrusted files: regular files of limited size, without building values that are not needed.

A general JSON parser takes twenty times the memory of a text of empty lists. This scanner knows what must come next,
builds nothing else, and names the byte at which something else came. It decodes UTF-8 as one character per byte: the
syntax of JSON is ASCII, and one other character would make the Python string of the whole text four times as large.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from contextlib import contextmanager
from json.decoder import scanstring  # type: ignore[attr-defined]  # the json module reads its own strings with it
from pathlib import Path

from inferplane.errors import CheckpointError
from inferplane.files import AGAIN, file_size

MAX_SKIPPED = 10_000
"""Most values that are skipped in one text; metadata hold a handful."""
MAX_DEPTH = 16
MAX_STRING_BYTES = 1024
"""Longest string that is returned. Published tensor names have at most 150 bytes. Error messages quote them."""

_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"-?[0-9][0-9.eE+-]{0,40}|true|false|null")
_SIZES = re.compile(r"\[([0-9, \t\r\n]{0,400})\]")
_SIZE = re.compile(r"0|[1-9][0-9]{0,18}")
_PLAIN = re.compile(rf'[ \t\r\n]*"([^"\\\x00-\x1f]{{0,{MAX_STRING_BYTES}}})"')
_STRING = re.compile(rf'"(?:[^"\\]|\\.){{0,{MAX_STRING_BYTES}}}"', re.DOTALL)
_PART = re.compile(r'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}){1,1000}')
_SHOWN = 64
_PIECE_BYTES = 2**20


@contextmanager
def reporting_read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a CheckpointError about this file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}.",
            remedy="allow this user to read it, or fetch the file again",
        ) from error


def read_text(path: Path, max_bytes: int) -> str:
    """Read a UTF-8 text file.

    Raises:
        CheckpointError: the file is not a regular file, larger than `max_bytes`, or not UTF-8.
    """
    try:
        return _read_limited(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from error


def open_scanner(path: Path, max_bytes: int) -> JsonScanner:
    """Return a scanner at the beginning of a file's text.

    Raises:
        CheckpointError: as `read_text`.
    """
    try:
        return JsonScanner(_read_limited(path, max_bytes))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from error


def _read_limited(path: Path, max_bytes: int) -> bytes:
    size = file_size(path)
    if size > max_bytes:
        raise CheckpointError(f"{path} has {size} bytes; at most {max_bytes} are read.", remedy=AGAIN)
    with reporting_read_errors(path):
        return path.read_bytes()


def _not_utf8(path: Path, error: UnicodeDecodeError) -> CheckpointError:
    return CheckpointError(f"{path} is not valid JSON: it is not UTF-8 text ({error}).", remedy=AGAIN)


class JsonScanner:
    """Reads a JSON text from front to back. Every method raises ValueError if the text has something else next.

    Args:
        raw: the text in UTF-8.

    Raises:
        UnicodeDecodeError: `raw` is not UTF-8.
    """

    def __init__(self, raw: bytes) -> None:
        if not raw.isascii():
            decoder = codecs.getincrementaldecoder("utf-8")()
            for start in range(0, len(raw), _PIECE_BYTES):
                decoder.decode(raw[start : start + _PIECE_BYTES])
            decoder.decode(b"", True)
        self.text, self.at, self.skipped = raw.decode("latin-1"), 0, 0

    def next(self, characters: str) -> str:
        """Read one character, which must be one of `characters`."""
        found = self.text[self.at : self.at + 1]
        if found in " \t\r\n":
            found = self.peek()
        if not found or found not in characters:
            raise ValueError(f"{' or '.join(characters)} expected at byte {self.at}, found {found!r}")
        self.at += 1
        return found

    def string(self) -> str:
        """Read a string and return its value."""
        if plain := _PLAIN.match(self.text, self.at):
            self.at = plain.end()
            return plain[1] if plain[1].isascii() else plain[1].encode("latin-1").decode()
        self.next('"')
        found = _STRING.match(self.text, self.at - 1)
        if found is None:
            raise ValueError(f"the string at byte {self.at - 1} does not end within {MAX_STRING_BYTES} characters")
        value: str = scanstring(found[0].encode("latin-1").decode(), 1, True)[0]
        self.at = found.end()
        return value

    def _skip_string(self) -> None:
        """Skip a string of any length without building it."""
        self.next('"')
        while found := _PART.match(self.text, self.at):
            self.at = found.end()
        if self.text[self.at : self.at + 1] != '"':
            raise ValueError(f"a string has no end, or a bad escape or control character, at byte {self.at}")
        self.at += 1

    def members(self) -> Iterator[str]:
        """Iterate over the keys of an object. The caller must read or skip each value before it takes the next key."""
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
        """Read a list of integers from 0."""
        self._skip_space()
        found = _SIZES.match(self.text, self.at)
        parts = found[1].split(",") if found and found[1].strip() else []
        if found is None or not all(_SIZE.fullmatch(part.strip()) for part in parts):
            raise ValueError(f"a list of sizes expected at byte {self.at}")
        self.at = found.end()
        return tuple(map(int, parts))

    def skip(self, depth: int = 0) -> str:
        """Skip any value. Returns the beginning of its text; for a number all of it."""
        self._skip_space()
        before = self.at
        self._skip(depth)
        return self.text[before : min(self.at, before + _SHOWN)]

    def _skip(self, depth: int) -> None:
        self.skipped += 1
        if self.skipped > MAX_SKIPPED or depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_SKIPPED} values, or {MAX_DEPTH} levels, beside those that are needed")
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
        """Check that only white space follows."""
        self._skip_space()
        if self.at != len(self.text):
            raise ValueError(f"the text goes on after its end at byte {self.at}")

    def _skip_space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def peek(self) -> str:
        """The next character after white space, "" at the end; it is not consumed."""
        self._skip_space()
        return self.text[self.at : self.at + 1]
