"""What the text of one sequence may go on with: the interface of its constraint, and a grammar's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from inferplane.engine.request.params import BEYOND_LIMITS
from inferplane.errors import UsageError

Mask = np.ndarray
"""Tokens that are allowed: int32 `[ceil(V / 32)]`, a bit per token, the lowest bit first. Never written to."""


class Constraint(ABC):
    """What the text of one sequence may go on with. Not for several threads at once.

    It accepts every token of the text, the end token included.
    """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the text has ended, so that the sequence has to end even if `ignore_eos` is set."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thought before the answer, with the marks around it."""
        return 0

    @property
    def can_begin_thought(self) -> bool:
        """Whether the text so far may yet turn out to begin a thought."""
        return False

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether the text so far satisfies the constraint."""

    @abstractmethod
    def mask(self) -> Mask | None:
        """The tokens allowed next; None allows all.

        Raises:
            UsageError: the constraint has become too complex to follow.
        """

    @abstractmethod
    def is_allowed(self, token: int) -> bool:
        """Whether a token may come next."""

    @abstractmethod
    def advance(self, token: int) -> None:
        """Advance the state by a token that is allowed; UsageError as `accept`."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens, an end token included; the state is as before them."""

    @abstractmethod
    def copy(self) -> Constraint:
        """Another sequence's state at the same place in the text."""

    def is_free(self, count: int) -> bool:
        """Whether each of the next `count` tokens may be any token, whatever those before it are."""
        return False

    def masks(self, drafts: Sequence[int] = ()) -> list[Mask | None]:
        """The tokens allowed next, and after each of these drafts: 1 + drafts masks, of which None allows all tokens.
        Mask i is for the token after the first i drafts.

        Masks after a draft that is not allowed, or ends the text, are None: they are never used. The state does not
        change.

        Raises:
            UsageError: the constraint has become too complex to follow.
        """
        masks: list[Mask | None] = [None] * (1 + len(drafts))
        if self.is_free(len(masks)):
            return masks
        count = 0
        try:
            for i in range(len(masks)):
                masks[i] = self.mask()
                if i == len(drafts) or self.ended or not self.is_allowed(drafts[i]):
                    break
                self.advance(drafts[i])
                count += 1
        finally:
            if count:
                self.rollback(count)
        return masks

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance the state by these tokens.

        Raises:
            UsageError: the constraint does not allow them, or has become too complex to follow.
        """
        for token in tokens:
            if not self.is_allowed(token):
                raise UsageError(f"Token {token} does not continue the constrained text.")
            self.advance(token)


class GrammarConstraint(Constraint):
    """A JSON schema, a regular expression or a grammar that the whole text belongs to. `Grammars` makes it.

    Once it allows nothing but the end of the text, masks contain the end tokens only; after one of them, `ended` is
    true.

    Args:
        matcher: llguidance's.
        end_ids: tokens that end a text.
        words: length of a mask.
    """

    def __init__(self, matcher: Any, end_ids: frozenset[int], words: int) -> None:
        self._matcher, self._end_ids, self._words = matcher, end_ids, words
        self._end_mask = mask_of(end_ids, words)
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def complete(self) -> bool:
        return bool(self._ended or self._matcher.is_accepting())

    def mask(self) -> Mask:
        """The tokens allowed next; only the end tokens where nothing else may follow."""
        if self._ended or self._matcher.is_stopped():
            self._check()
            return self._end_mask
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        self._check()
        return mask

    def is_allowed(self, token: int) -> bool:
        if self._ended:
            return False
        if self._is_end_now(token) or self._matcher.validate_tokens([token]):
            return True
        self._check()
        return False

    def advance(self, token: int) -> None:
        if self._is_end_now(token):
            self._ended = True
        else:
            self._matcher.consume_token(token)
            self._check()

    def _is_end_now(self, token: int) -> bool:
        """Whether a token ends the text now: the text is complete, or the grammar names the token (`<|eos|>`)."""
        if token not in self._end_ids:
            return False
        return bool(self._matcher.is_accepting() or int(self.mask()[token // 32]) >> token % 32 & 1)

    def rollback(self, count: int) -> None:
        if self._ended and count:
            self._ended = False
            count -= 1
        if count:
            self._matcher.rollback(count)

    def copy(self) -> GrammarConstraint:
        """Another state at the same place. It shares the memory that both need to follow their texts, so it is for
        texts of one request only.
        """
        found = GrammarConstraint(self._matcher.deep_copy(), self._end_ids, self._words)
        found._ended = self._ended
        return found

    def _check(self) -> None:
        """Raise UsageError if llguidance reports that it can follow the constraint no further."""
        if self._matcher.is_error():
            raise UsageError(
                f"{BEYOND_LIMITS}: {first_lines(self._matcher.get_error())}.",
                remedy="simplify the schema, regular expression or grammar",
            )


def mask_of(tokens: Collection[int], words: int, others: Mask | None = None) -> Mask:
    """A mask of `words` integers that allows these tokens, and what `others` allows."""
    mask = np.zeros(words, np.uint32) if others is None else others.view(np.uint32).copy()
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    return mask.view(np.int32)


@lru_cache(maxsize=64)
def mask_without(tokens: frozenset[int], words: int) -> Mask:
    """A mask of `words` integers that allows all tokens but these."""
    return ~mask_of(tokens, words)


def first_lines(error: str) -> str:
    """The first line of llguidance's error, and its line that says what is wrong with a regular expression."""
    first, *rest = error.strip().split("\n") or [""]
    wrong = next((line for line in rest if line.startswith("error: ")), "")
    shown = first.rstrip(":. ")[: 100 if wrong else 200]
    return f"{shown}: {wrong[7:].rstrip('.')[:100]}" if wrong else shown
