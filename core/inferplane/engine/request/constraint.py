"""The state of one sequence in its constraint: a JSON schema, a regular expression or a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from inferplane.engine.request.params import BEYOND_LIMITS
from inferplane.errors import UsageError


class Constraint:
    """The state of one sequence in its constraint. `Grammars.start` makes it. Not for several threads at once.

    It accepts every token of the text, the end token included. Once the constraint allows nothing but the end of the
    text, masks contain the end tokens only; after one of them, `ended` is true, and the sequence has to end even if
    `ignore_eos` is set.
    """

    def __init__(self, matcher: Any, end_ids: frozenset[int], words: int) -> None:
        self._matcher, self._end_ids, self._words = matcher, end_ids, words
        self.ended = False
        self._end_mask = np.zeros(words, np.uint32)
        for token in end_ids:
            self._end_mask[token // 32] |= np.uint32(1 << (token % 32))

    @property
    def complete(self) -> bool:
        """Whether the text so far satisfies the constraint."""
        return self.ended or self._matcher.is_accepting()

    def masks(self, drafts: Sequence[int] = ()) -> np.ndarray:
        """The tokens allowed next, and after each of these drafts: int32 `[1 + drafts, ceil(V / 32)]`, a bit per token,
        the lowest bit first. Row i is for the token after the first i drafts.

        Rows after a draft that is not allowed allow all: they are never used. The state does not change.

        Raises:
            UsageError: the constraint has become too complex to follow.
        """
        masks = np.full((1 + len(drafts), self._words), -1, np.int32)
        consumed = 0
        for i in range(1 + len(drafts)):
            masks[i] = self._mask()
            if i == len(drafts) or drafts[i] in self._end_ids or not self._matcher.validate_tokens([drafts[i]]):
                break
            self._matcher.consume_token(drafts[i])
            consumed += 1
        if consumed:
            self._matcher.rollback(consumed)
        return masks

    def _mask(self) -> np.ndarray:
        """The tokens allowed in the present state, int32 `[ceil(V / 32)]`; only the end tokens where nothing else may
        follow.
        """
        if self.ended or self._matcher.is_stopped():
            self._check()
            return self._end_mask.view(np.int32)
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        self._check()
        return mask

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance the state by these tokens.

        Raises:
            UsageError: the constraint does not allow them, or has become too complex to follow.
        """
        for token in tokens:
            if token in self._end_ids and not self.ended and self._may_end(token):
                self.ended = True
            elif self.ended or not self._matcher.validate_tokens([token]):
                self._check()
                raise UsageError(f"Token {token} does not continue the constrained text.")
            else:
                self._matcher.consume_token(token)
                self._check()

    def _may_end(self, token: int) -> bool:
        """Whether this end token may come now: the text is complete, or the grammar names the token (`<|eos|>`)."""
        if self._matcher.is_accepting():
            return True
        return bool(int(self._mask()[token // 32]) >> token % 32 & 1)

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens, an end token included; the state is as before them."""
        if self.ended and count:
            self.ended = False
            count -= 1
        if count:
            self._matcher.rollback(count)

    def _check(self) -> None:
        """Raise UsageError if llguidance reports that it can follow the constraint no further."""
        if self._matcher.is_error():
            raise UsageError(
                f"{BEYOND_LIMITS}: {first_lines(self._matcher.get_error())}.",
                remedy="simplify the schema, regular expression or grammar",
            )


def first_lines(error: str) -> str:
    """The first line of llguidance's error, and its line that says what is wrong with a regular expression."""
    first, *rest = error.strip().split("\n") or [""]
    wrong = next((line for line in rest if line.startswith("error: ")), "")
    shown = first.rstrip(":. ")[: 100 if wrong else 200]
    return f"{shown}: {wrong[7:].rstrip('.')[:100]}" if wrong else shown
