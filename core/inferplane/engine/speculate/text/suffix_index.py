"""`SuffixIndex`: where the last tokens of a sequence stood before, and which tokens followed, with their counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

KEYS = (3, 1)
"""Lengths in tokens of the keys by which earlier occurrences are found, the longest first."""
MAX_OCCURRENCES = 24
"""Most occurrences of a key that are read, the newest ones."""
MAX_LEVELS = 4
"""Most different lengths of the matched suffix that are tried."""
BETWEEN = -1
"""Stands behind each text; no token has this id."""


class Occurrence(NamedTuple):
    """An earlier occurrence of a sequence's last tokens.

    Args:
        matched: how many of the last tokens stand there.
        place: of the token behind them.
    """

    matched: int
    place: int


class TextDrafts(NamedTuple):
    """Drafts, and their score: how many are likely accepted, the sum of their estimated probabilities."""

    tokens: list[int]
    score: float


NO_DRAFTS_FOUND = TextDrafts([], 0.0)


class SuffixIndex:
    """Texts as tokens, in which each place is linked with the place before it that has the same key.

    The occurrences of a suffix are found by its key and compared backwards. What follows them, merged where it begins
    alike, is the part of a suffix tree below that suffix, with its counts; only this part is made, when it is read. So
    a token costs a link for each of `KEYS`, and reading costs as much in a long text as in a short one.

    Args:
        max_depth: most tokens of a suffix that are compared, at least 1.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth, self.keys = max_depth, tuple(n for n in KEYS if n <= max_depth)
        self.tokens: list[int] = []
        self._offset = 0  # places count every token that was ever added; this one is that of tokens[0]
        self._first = 0  # the first place that is not dropped
        self._begun = 0  # the place at which the newest text begins; no key reaches before it
        self._links: list[list[int]] = [[] for _ in self.keys]
        self._newest: list[dict[tuple[int, ...], int]] = [{} for _ in self.keys]

    def __len__(self) -> int:
        """Number of tokens that are not dropped."""
        return self._offset + len(self.tokens) - self._first

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        known, offset, begun = self.tokens, self._offset, self._begun - self._offset
        each = tuple(zip(self.keys, self._links, self._newest))
        for token in tokens:
            known.append(token)
            count = len(known)
            place = offset + count
            for length, links, newest in each:
                key = tuple(known[count - length : count]) if count - length >= begun else ()
                links.append(newest.get(key, -1))
                newest[key] = place

    def end_text(self) -> None:
        """Separate what is added later from what was added so far."""
        self.extend((BETWEEN,))
        self._begun = self._offset + len(self.tokens)

    def drop_first_text(self, count: int) -> None:
        """Drop the first text, which has `count` tokens with its end."""
        start = self._first - self._offset
        for length, newest in zip(self.keys, self._newest):
            for at in range(start + 1, start + count + 1):
                key = tuple(self.tokens[at - length : at]) if at - length >= start else ()
                if newest.get(key) == self._offset + at:
                    del newest[key]
        self._first += count
        if (dropped := self._first - self._offset) * 2 > len(self.tokens):
            for each in (self.tokens, *self._links):
                del each[:dropped]
            self._offset = self._first

    def find(self, suffix: Sequence[int]) -> list[Occurrence]:
        """Earlier occurrences of a suffix with a token behind them, by the longest key that has any; the longest match
        first, the newest first among equal ones. `suffix` are the last tokens of a sequence, up to `max_depth`.
        """
        tokens, offset, size = self.tokens, self._offset, len(suffix)
        for length, links, newest in zip(self.keys, self._links, self._newest):
            if size < length:
                continue
            found: list[Occurrence] = []
            place = newest.get(tuple(suffix[size - length :]), -1)
            while place > self._first and len(found) < MAX_OCCURRENCES:
                at = place - offset
                if at < len(tokens):
                    matched, most = length, min(size, at)
                    while matched < most and tokens[at - 1 - matched] == suffix[size - 1 - matched]:
                        matched += 1
                    found.append(Occurrence(matched, place))
                place = links[at - 1]
            if found:
                return sorted(found, reverse=True)
        return []

    def draft(self, suffix: Sequence[int], max_drafts: int, per_match: float, min_probability: float) -> TextDrafts:
        """The tokens that most likely follow a suffix, one after the other.

        After each matched length that occurs (the longest ones), the most frequent next token is taken while the
        probability of all of them, by the counts, is high enough; the drafts of the length that promises most accepted
        ones are returned.

        Args:
            suffix: the last tokens of a sequence, up to `max_depth`.
            max_drafts: most tokens to return.
            per_match: most drafts for each token of the matched suffix.
            min_probability: least estimated probability that a draft is accepted, which needs all before it.

        Source: SuffixDecoding, arXiv 2411.04975, for the score and for lengths that follow the matched one.
        """
        found = self.find(suffix)
        best = NO_DRAFTS_FOUND
        for matched in sorted({o.matched for o in found}, reverse=True)[:MAX_LEVELS]:
            limit = min(max_drafts, int(per_match * matched))
            if limit <= best.score:
                break  # shorter matches have no higher limit
            drafts = self._follow(
                [o.place - self._offset for o in found if o.matched >= matched], limit, min_probability
            )
            if drafts.score > best.score:
                best = drafts
        return best

    def _follow(self, at: list[int], limit: int, min_probability: float) -> TextDrafts:
        """Up to `limit` tokens from these indices on, each the most frequent one behind those before it; of equally
        frequent ones the first in the order of the indices.
        """
        known, count = self.tokens, len(self.tokens)
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < limit and at:
            counts: dict[int, int] = {}
            for i in at:
                if i < count:
                    counts[known[i]] = counts.get(known[i], 0) + 1
            token = max(counts, key=counts.__getitem__, default=BETWEEN)
            if token == BETWEEN:
                break
            probability *= counts[token] / len(at)
            if probability < min_probability:
                break
            tokens.append(token)
            score += probability
            at = [i + 1 for i in at if i < count and known[i] == token]
        return TextDrafts(tokens, score)
