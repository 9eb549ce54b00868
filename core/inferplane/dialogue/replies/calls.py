"""The calls of one reply while it is parsed: which functions are known, and the events of each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from inferplane.dialogue.replies.events import Arguments, CallStart, Content, Event
from inferplane.dialogue.replies.reader import NotACall, TextReader

MAX_CALLS = 16
"""Most calls in a reply; others are left out."""


class CallWriter:
    """Turns what is read of calls into events.

    A call that has begun stays one. So it begins only once its name is known and its arguments have begun as they must.

    Args:
        reader: of the reply's text. What it has recorded is forgotten when a call begins.
        tools: name -> JSON schema of the parameters.
        emit: takes events.
        max_calls: calls beyond them are read without events.
    """

    def __init__(
        self,
        reader: TextReader,
        tools: Mapping[str, Mapping[str, Any]],
        emit: Callable[[Event], object],
        max_calls: int,
    ) -> None:
        self._reader, self.tools, self._emit, self._max_calls = reader, tools, emit, max_calls
        self.max_name = max(map(len, tools), default=0)
        self.count = 0
        self.is_open = False
        """A call has begun, and its arguments have not ended."""
        self.announced: tuple[str, str] | None = None
        """Name and id of a call whose arguments are about to begin."""

    def announce(self, name: str, call_id: str = "") -> None:
        """Note the call that is about to begin; raise NotACall if the function is unknown."""
        if name not in self.tools:
            raise NotACall
        self.announced = name, call_id

    def begin(self) -> None:
        """Begin the call that was announced."""
        assert self.announced is not None
        name, call_id = self.announced
        self.announced, self.is_open = None, True
        self._reader.stop_record()
        if self.count < self._max_calls:
            self._emit(CallStart(self.count, name, call_id))

    def write(self, text: str) -> None:
        """Add a piece to the arguments."""
        if text and self.count < self._max_calls:
            self._emit(Arguments(self.count, text))

    def finish(self) -> None:
        """End the call. What is read from here on is recorded."""
        self.count += 1
        self.is_open = False
        self._reader.record()

    def abandon(self) -> None:
        """End a call that does not go on as its form demands, and forget one that was announced."""
        self.count += self.is_open
        self.is_open, self.announced = False, None

    def write_content(self, text: str) -> None:
        """Pass on text that is part of no call."""
        if text:
            self._emit(Content(text))


class BareCall:
    """Makes the answer of a reply the one call of it, for replies that are the arguments alone, without marks.

    Args:
        name: of the function.
    """

    def __init__(self, name: str) -> None:
        self._name, self._is_begun = name, False

    def read(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events, with content as arguments."""
        for event in events:
            if isinstance(event, Content):
                yield from self.end()
                yield Arguments(0, event.text)
            else:
                yield event

    def end(self) -> Iterator[Event]:
        """Yield the beginning of the call, if it has not come yet."""
        if not self._is_begun:
            self._is_begun = True
            yield CallStart(0, self._name, "")
