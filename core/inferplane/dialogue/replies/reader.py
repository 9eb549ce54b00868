"""Text that arrives piece by piece, for code that reads it as if it were there.

Such code consists of generators, which yield where they need more text. What they have read can be recorded, so that a
call that turns out to be none is text again. Text is looked at once, except for the few characters of a mark that may
have begun, so the time grows with the length of the text, however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""A generator that yields where it needs more text, and returns a result."""
Emit = Callable[[str], object]
"""Takes a piece of text."""
SPACE = " \t\r\n"


class NotACall(Exception):
    """What was read is no call of a known function in the form that was expected."""


class TextEnded(Exception):
    """The text ended inside of a call."""


class Marks:
    """Marks to be found in a text.

    Args:
        marks: the texts of the marks.
        padding: characters before a mark that belong to it.
        max_padding: at most so many.
    """

    def __init__(self, marks: Sequence[str], padding: str = "", max_padding: int = 0) -> None:
        ordered = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._starts = frozenset(mark[:n] for mark in ordered for n in range(1, len(mark)))
        self._longest = max(map(len, ordered), default=1) - 1
        self._padding, self._max_padding = padding, max_padding

    def find(self, text: str, start: int, is_ended: bool) -> tuple[int, int, int]:
        """Find the first mark.

        Returns:
            Where the text before it ends, where it begins, and where it ends. Without a mark the last two are equal:
            from there on, more text is needed to decide.
        """
        found = self._pattern.search(text, start)
        begin = found.start() if found else len(text)
        if not is_ended:
            for at in range(max(start, len(text) - self._longest), min(begin + 1, len(text))):
                if text[at:] in self._starts:  # a mark, or a longer one, may have begun
                    found, begin = None, at
                    break
        stop = begin
        if found or not is_ended:
            least = max(start, begin - self._max_padding)
            while stop > least and text[stop - 1] in self._padding:
                stop -= 1
        return stop, begin, found.end() if found else begin


class TextReader:
    """The text of one reply. `feed` adds to it; its generators read it."""

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self.is_ended = False
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        """Add text."""
        self._text, self._at = self._text[self._at :] + text, 0

    # -- what was read

    def record(self, before: str = "") -> None:
        """Record from here on what is read. The record begins with `before`."""
        self._record = [before]

    def stop_record(self) -> str:
        """Return the record, and record no more."""
        found, self._record = "".join(self._record or ()), None
        return found

    def _take(self, end: int) -> str:
        piece, self._at = self._text[self._at : end], end
        if self._record is not None:
            self._record.append(piece)
        return piece

    # -- reading

    def ahead(self, count: int) -> Steps[str]:
        """Return the next characters without reading them: fewer than `count` at the end of the text."""
        while len(self._text) - self._at < count and not self.is_ended:
            yield
        return self._text[self._at : self._at + count]

    def next_character(self) -> Steps[str]:
        """Return the next character without reading it; "" at the end."""
        if self._at < len(self._text):
            return self._text[self._at]
        return (yield from self.ahead(1))

    def take(self, count: int) -> Steps[str]:
        """Read so many characters; raise TextEnded if there are fewer."""
        if len((yield from self.ahead(count))) < count:
            raise TextEnded
        return self._take(self._at + count)

    def skip(self, characters: str) -> Steps[str]:
        """Read a run of these characters."""
        out = ""
        while True:
            end = self._at
            while end < len(self._text) and self._text[end] in characters:
                end += 1
            out += self._take(end)
            if self._at < len(self._text) or self.is_ended:
                return out
            yield

    def match(self, *marks: str, is_expected: bool = False) -> Steps[str]:
        """Read the longest of the marks with which the text goes on.

        Args:
            marks: texts.
            is_expected: a mark that the end of the text cuts short is read too.

        Returns:
            The mark; "" if it is none of them.
        """
        best = ""
        for mark in sorted(filter(None, marks), key=len, reverse=True):
            while True:
                there = self._text[self._at : self._at + len(mark)]
                if there == mark or not mark.startswith(there):
                    break
                if self.is_ended:
                    break
                yield
            if there == mark or (is_expected and there and self.is_ended and mark.startswith(there)):
                best = mark
                self._take(self._at + len(there))
                break
        return best

    def expect(self, mark: str) -> Steps[None]:
        """Read a mark; raise NotACall if the text goes on otherwise, and TextEnded if it ends."""
        if not (yield from self.match(mark)):
            raise TextEnded if mark.startswith((yield from self.ahead(len(mark)))) else NotACall

    def is_at(self, *marks: str, is_expected: bool = True) -> Steps[bool]:
        """Whether the text goes on with one of these marks.

        Args:
            marks: texts.
            is_expected: the beginning of a mark at the end of the text counts too.
        """
        while True:
            there = self._text[self._at : self._at + max(map(len, marks), default=0)]
            if any(mark and there.startswith(mark) for mark in marks):
                return True
            may_be = any(mark.startswith(there) for mark in marks)
            if not may_be or self.is_ended:
                return may_be and is_expected
            yield

    def read_to(self, most: int, *marks: str, reads_mark: bool = True) -> Steps[tuple[str, str]]:
        """Read up to the first of these marks.

        Args:
            most: characters before it, at most.
            marks: texts, none of which begins another.
            reads_mark: the mark is read too.

        Returns:
            The text before the mark, and the mark; all remaining text and "" if the text ends.

        Raises:
            NotACall: no mark is near.
        """
        while True:
            limit = self._at + most + max(map(len, marks))
            found = [(at, mark) for mark in marks if (at := self._text.find(mark, self._at, limit)) >= 0]
            if found:
                at, mark = min(found)
                if at - self._at > most:
                    raise NotACall
                text = self._take(at)
                if reads_mark:
                    self._take(at + len(mark))
                return text, mark
            if len(self._text) >= limit:
                raise NotACall
            if self.is_ended:
                return self._take(len(self._text)), ""
            yield

    def copy_run(self, pattern: re.Pattern[str], emit: Emit) -> Steps[None]:
        """Read the characters that a pattern of one repeated class matches, and pass them on as they come."""
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None and found.end() > self._at:
                emit(self._take(found.end()))
            if self._at < len(self._text) or self.is_ended:
                return
            yield

    def copy_until(self, marks: Marks, emit: Emit) -> Steps[tuple[str, str]]:
        """Read up to the first of these marks, and pass on the text before it as it comes.

        Returns:
            The padding before the mark, which is not passed on, and the mark. Both are "" at the end of the text.
        """
        while True:
            stop, begin, end = marks.find(self._text, self._at, self.is_ended)
            if stop > self._at:
                emit(self._take(stop))
            if end > begin:
                return self._take(begin), self._take(end)
            if self.is_ended:
                return "", ""
            yield

    def drop_rest(self) -> None:
        """Forget the text that was not read."""
        self._at = len(self._text)
