"""JSON in files that nobody vouches for: regular files of a bounded size, scanned without building more than is wanted.

A parser for any JSON takes twenty times a text's memory for a text of empty lists. A scanner that knows what must come
next takes none, and can say where it did not.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]  # what the json module reads its own strings with
from pathlib import Path

from inferplane.errors import CheckpointError

AGAIN = "fetch the file again"
MOST_SKIPPED = 10_000
"""Values that are passed over in one text; metadata hold a handful."""
MOST_DEPTH = 16

_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"-?[0-9][0-9.eE+-]{0,40}|true|false|null")
_SIZES = re.compile(r"\[([0-9, \t\r\n]{0,400})\]")
_SIZE = re.compile(r"0|[1-9][0-9]{0,18}")


def file_size(path: Path) -> int:
    """Bytes of a regular file, which a link may lead to.

    Raises:
        CheckpointError: there is none, or it is a directory, a pipe, a device, a link that leads nowhere.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}.", remedy=AGAIN) from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is no regular file.", remedy=AGAIN)
    return found.st_size


def read_text(path: Path, limit_bytes: int) -> str:
    """A file's text, UTF-8.

    Raises:
        CheckpointError: it is no regular file, larger than `limit_bytes`, or no UTF-8.
    """
    size = file_size(path)
    if size > limit_bytes:
        raise CheckpointError(f"{path} has {size} bytes; at most {limit_bytes} are read.", remedy=AGAIN)
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.", remedy=AGAIN) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: it is not UTF-8 text ({error}).", remedy=AGAIN) from error


class Scan:
    """A place in a JSON text that moves forward. Every method raises ValueError when something else comes next."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.skipped = text, 0, 0

    def next(self, characters: str) -> str:
        """Pass over one of these characters."""
        self._space()
        found = self.text[self.at : self.at + 1]
        if not found or found not in characters:
            raise ValueError(f"{' or '.join(characters)} expected at character {self.at}, found {found!r}")
        self.at += 1
        return found

    def string(self) -> str:
        """A string's value."""
        self.next('"')
        value, self.at = scanstring(self.text, self.at, True)
        return value

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
            raise ValueError(f"a list of sizes expected at character {self.at}")
        self.at = found.end()
        return tuple(map(int, parts))

    def skip(self, depth: int = 0) -> str:
        """Pass over any value; its text."""
        self._space()
        before = self.at
        self._skip(depth)
        return self.text[before : self.at]

    def _skip(self, depth: int) -> None:
        self.skipped += 1
        if self.skipped > MOST_SKIPPED or depth > MOST_DEPTH:
            raise ValueError(f"more than {MOST_SKIPPED} values, or {MOST_DEPTH} levels, beside what is asked for")
        start = self.peek()
        if start == '"':
            self.string()
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
            raise ValueError(f"a value expected at character {self.at}, found {start!r}")

    def end(self) -> None:
        """Nothing but space may follow."""
        self._space()
        if self.at != len(self.text):
            raise ValueError(f"the text goes on behind its end at character {self.at}")

    def _space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def peek(self) -> str:
        """The character that comes next, "" at the end."""
        self._space()
        return self.text[self.at : self.at + 1]
