"""Fields of a request's parameters: limits and checks of single values, and the records that some fields hold.

The records are of spans of a generated text that follow rules of their own: the thought before an answer, and calls of
tools in it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from inferplane.dialogue.replies import grammar
from inferplane.errors import UsageError

MAX_COUNT = 2**31 - 1
"""Largest number of tokens, and largest token id, that a parameter may name; steps hold them in 64 bits or fewer."""
MAX_GRAMMAR_BYTES = {"json_schema": 64 * 1024, "regex": 4 * 1024, "grammar": grammar.MAX_BYTES}
MAX_MARKS, MAX_MARK_CHARACTERS = 8, 256
MAX_FORCED_CHARACTERS = 4096
MAX_STRUCTURAL_TAGS, MAX_TAG_GRAMMARS_BYTES = 64, 256 * 1024
MAX_VISIBLE_TOKENS = 256

Marks = str | Sequence[str]


def describe_value(value: Any) -> str:
    """The `repr` of a value, shortened to 80 characters, for messages."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def is_integer(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether a value is an int, and no bool, from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_text(value: Any, max_bytes: int) -> bool:
    """Whether a value is a string of 1 to `max_bytes` bytes in UTF-8, or None."""
    return value is None or (isinstance(value, str) and 0 < len(value.encode(errors="replace")) <= max_bytes)


@dataclass(frozen=True)
class ReasoningSpan:
    """The thought that a model writes before its answer. A constraint, or the tags of `StructuralTag`, begin after it.

    Args:
        end: text that ends the thought, or several such texts. Held as a tuple.
        begin: text that begins it, or several such texts; white space may come before it. A text that begins otherwise
            is an answer without a thought. Held as a tuple.
        is_open: the prompt has begun the thought already.
        max_tokens: most tokens of the thought after `begin`, before `forced_end`; a character that is begun is
            completed. None: any number.
        forced_end: text that is forced after `max_tokens`; it holds an end. "": the first text of `end`.
        header_begin: texts that begin a header of a part of the reply, as of one of several messages: stop strings do
            not count in headers, nor in a part whose header ends with a text of `begin`. Held as a tuple.
        header_end: text that ends a header.

    Raises:
        UsageError: a value lies outside its range; the thought cannot begin, or `forced_end` does not end it.
    """

    end: Marks
    begin: Marks = ()
    is_open: bool = False
    max_tokens: int | None = None
    forced_end: str = ""
    header_begin: Marks = ()
    header_end: str = ""

    def __post_init__(self) -> None:
        for name in ("begin", "end", "header_begin"):
            object.__setattr__(self, name, as_tuple(getattr(self, name)))
        _check(self, _SPAN_CHECKS)
        if not self.forced_end:
            object.__setattr__(self, "forced_end", self.end[0])
        if not any(mark in self.forced_end for mark in self.end):
            raise UsageError(
                f"ReasoningSpan: forced_end = {describe_value(self.forced_end)} does not end the thought.",
                there_is=f"the ends {', '.join(map(repr, self.end))}",
                remedy="put one of them into it",
            )

    @classmethod
    def of(cls, value: Any) -> ReasoningSpan | None:
        """A span from a span, a mapping of its fields, or None; TypeError for anything else."""
        return _record_of(cls, value) if value is not None else None


@dataclass(frozen=True)
class StructuralTag:
    """A rule for a part of a text: from a trigger on, the text belongs to a grammar; when that is complete, it is free
    again. Whatever precedes the trigger is free.

    Args:
        trigger: text that begins the part, and is not part of the grammar. White space that its last token holds after
            it is not part of the grammar either.
        grammar: of the text after the trigger, in llguidance's dialect of Lark; of at most 64 KiB.

    Raises:
        UsageError: a value lies outside its range.
    """

    trigger: str
    grammar: str

    def __post_init__(self) -> None:
        _check(self, _TAG_CHECKS)

    @classmethod
    def several(cls, value: Any) -> tuple[StructuralTag, ...]:
        """A tuple of tags from several tags or mappings of their fields, or from None; TypeError for anything else."""
        return tuple(_record_of(cls, tag) for tag in value or ())


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A tuple of None or "" (empty), one string or several."""
    return ((value,) if value else ()) if isinstance(value, str) else tuple(value or ())


def are_tags(tags: Sequence[StructuralTag]) -> bool:
    """Whether so many tags, with grammars of that length together and different triggers, may stand in one request."""
    total_bytes = sum(len(tag.grammar.encode(errors="replace")) for tag in tags)
    are_different = len({tag.trigger for tag in tags}) == len(tags)
    return len(tags) <= MAX_STRUCTURAL_TAGS and total_bytes <= MAX_TAG_GRAMMARS_BYTES and are_different


def are_texts(texts: Sequence[Any], most: int) -> bool:
    """Whether there are at most so many strings, of 1 to `MAX_MARK_CHARACTERS` characters each."""
    return len(texts) <= most and all(isinstance(t, str) and 0 < len(t) <= MAX_MARK_CHARACTERS for t in texts)


def _record_of(kind: Any, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"no {kind.__name__}, and no mapping of its fields")
    known = [field.name for field in fields(kind)]
    unknown = [key for key in value if key not in known]
    if unknown:
        raise TypeError(f"no field {unknown[0]!r}; there is {', '.join(known)}")
    return kind(**value)


_MARK_RULE = f"of at most {MAX_MARKS} strings of 1 to {MAX_MARK_CHARACTERS} characters"
_Checks = tuple[tuple[str, Callable[[Any, Any], bool], str], ...]
_SPAN_CHECKS: _Checks = (
    ("end", lambda marks, s: bool(marks) and are_texts(marks, MAX_MARKS), f"of one string and more, {_MARK_RULE}"),
    ("begin", lambda marks, s: are_texts(marks, MAX_MARKS), _MARK_RULE),
    ("is_open", lambda flag, s: isinstance(flag, bool), "True and False"),
    (
        "begin",
        lambda marks, s: bool(marks or s.is_open),
        "of one string and more where the prompt has begun no thought",
    ),
    ("max_tokens", lambda n, s: n is None or is_integer(n, 0, MAX_COUNT), f"from 0 to {MAX_COUNT}, or None"),
    (
        "forced_end",
        lambda text, s: isinstance(text, str) and len(text) <= MAX_FORCED_CHARACTERS,
        f"of at most {MAX_FORCED_CHARACTERS} characters of text",
    ),
    ("header_begin", lambda marks, s: are_texts(marks, MAX_MARKS), _MARK_RULE),
    (
        "header_end",
        lambda text, s: (
            isinstance(text, str) and len(text) <= MAX_MARK_CHARACTERS and bool(text) == bool(s.header_begin)
        ),
        f"of 1 to {MAX_MARK_CHARACTERS} characters of text where there is a header_begin, and empty elsewhere",
    ),
)
_TAG_CHECKS: _Checks = (
    ("trigger", lambda text, t: are_texts((text,), 1), f"of 1 to {MAX_MARK_CHARACTERS} characters of text"),
    (
        "grammar",
        lambda text, t: text is not None and is_text(text, MAX_GRAMMAR_BYTES["grammar"]),
        f"of 1 to {MAX_GRAMMAR_BYTES['grammar']} bytes of text",
    ),
)


def _check(record: Any, checks: _Checks) -> None:
    for name, holds, rule in checks:
        value = getattr(record, name)
        if not holds(value, record):
            raise UsageError(f"{type(record).__name__}: {name} = {describe_value(value)}.", there_is=f"values {rule}")
