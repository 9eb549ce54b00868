"""MarkFinder in a text that is written token by token: a mark may be one token, several, or a part of one."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import islice, takewhile

MAX_CACHED_MARKS = 256
SPACE = b" \t\r\n"

Completions = dict[int, tuple[int, ...]]
"""Bytes of a mark that are there -> tokens that complete it and go on with more than white space."""


class MarkedTokens:
    """The tokens of a model, as the bytes that they add to a text. Its methods may be called from any thread.

    Args:
        bytes_of: a token's bytes; of a special token, its name's.
        encode: the token ids of a text, in which the names of special tokens are these.
        vocab: V, token ids are below this.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], encode: Callable[[str], Sequence[int]], vocab: int) -> None:
        self.bytes_of, self.encode, self._vocab = bytes_of, encode, vocab
        self._lock = threading.Lock()  # guards what is cached
        self._cache: OrderedDict[bytes, Completions] = OrderedDict()

    def completions(self, mark: bytes) -> Completions:
        """The tokens that complete a mark and go on with more than white space, by how much of it is there."""
        with self._lock:
            found = self._cache.get(mark)
            if found is None:
                found = self._cache[mark] = dict(self._find(mark))
                if len(self._cache) > MAX_CACHED_MARKS:
                    self._cache.popitem(last=False)
            return found

    def _find(self, mark: bytes) -> Iterable[tuple[int, tuple[int, ...]]]:
        inside = [i for token, i in self._sorted if mark in token and token.partition(mark)[2].strip(SPACE)]
        if inside:
            yield 0, tuple(inside)
        for there in range(1, len(mark)):
            rest = mark[there:]
            begin = islice(self._sorted, bisect_left(self._sorted, (rest, -1)), None)
            alike = takewhile(lambda one, rest=rest: one[0].startswith(rest), begin)  # type: ignore[misc]
            beyond = [i for token, i in alike if token[len(rest) :].strip(SPACE)]
            if beyond:
                yield there, tuple(beyond)

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((self.bytes_of(i), i) for i in range(self._vocab))


class MarkFinder:
    """One or several marks to find in a text.

    Args:
        texts: the marks.
        tokens: the model's.
        may_run_over: a token may complete a mark and go on with the text after it; otherwise `running_over` has those
            tokens.
    """

    def __init__(self, texts: Sequence[str], tokens: MarkedTokens, *, may_run_over: bool) -> None:
        self._marks = [text.encode() for text in texts]
        self._max_tail = max(map(len, self._marks), default=1) - 1
        found = [] if may_run_over else [tokens.completions(mark) for mark in self._marks]
        self._beyond = [(mark[:there], ids) for mark, c in zip(self._marks, found) for there, ids in c.items()]

    def can_begin(self, text: bytes) -> bool:
        """Whether a text is the beginning of a mark, or empty."""
        return not text or any(mark.startswith(text) for mark in self._marks)

    def find(self, text: bytes) -> tuple[int, int, bytes] | None:
        """The first mark in a text, the longest one where several begin at the same place: its number, where it begins,
        and the text after it; None if there is none.
        """
        found = [(at, -len(m), i) for i, m in enumerate(self._marks) if (at := text.find(m)) >= 0]
        if not found:
            return None
        at, length, number = min(found)
        return number, at, text[at - length :]

    def tail(self, text: bytes) -> bytes:
        """The end of a text without a mark in which a mark may have begun."""
        return text[-self._max_tail :] if self._max_tail else b""

    def running_over(self, tail: bytes) -> frozenset[int]:
        """Tokens that complete a mark after this end of a text, and go on with more than white space."""
        if not self._beyond:
            return frozenset()
        return frozenset(i for begun, ids in self._beyond if tail.endswith(begun) for i in ids)


def is_inside_character(text: bytes) -> bool:
    """Whether a text ends in the first bytes of a character in UTF-8 that has more."""
    for back in range(1, min(3, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character says how many follow
            return byte >= 0xC0 and back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
