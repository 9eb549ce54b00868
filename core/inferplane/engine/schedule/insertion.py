"""How prompts join sequences that decode: how many tokens of prompts a step takes beside theirs.

A step makes every running stream wait. With a limit of the time between two tokens, prompts get as many tokens of a
step as measured times of earlier steps allow. Numbers only; no tensor is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIN_TOKENS = 16
"""Tokens that prompts get in a step whatever it takes, all together: they have to be read some day."""
FIRST_TOKENS = 64
"""Most tokens of prompts in a step before any were measured; then twice as many as lately."""
MARGIN = 0.9
"""Share of the limit that a step is to take; the rest is for what happens between steps."""
MEMORY = 0.95
"""Weight of a measured step beside the next one of its kind."""
RIDGE = 1e-4
"""Added to the sums of squares, so that they can be inverted while steps are all alike."""
OUTLIER = 4.0
"""How many times the predicted time counts at most; a step may compile, or wait for a neighbour."""
UNITS = (1.0, 2.0**-4, 2.0**-8, 2.0**-20)
"""By which numbers of a step are multiplied, so that their sums of squares are of like size."""


@dataclass(frozen=True)
class Insertion:
    """Limits of what joins in a step.

    Args:
        max_new_requests_per_step: most requests that join in one step; None: unlimited.
        max_prompt_tokens_per_step: most tokens of prompts in a step in which others decode; None: unlimited.
        max_inter_token_ms: milliseconds between two tokens of running streams: prompts get as many tokens of a step
            as measured times allow; None: all that the step has.
    """

    max_new_requests_per_step: int | None = None
    max_prompt_tokens_per_step: int | None = None
    max_inter_token_ms: int | None = None


UNLIMITED = Insertion()


class StepWork(NamedTuple):
    """What a step computes: rows of sequences that decode, tokens of prompts, and pairs of a query and a key."""

    decode_rows: int = 0
    prompt_tokens: int = 0
    pairs: float = 0.0


class StepTimes:
    """The time of a step as a sum: a constant, so much per row that decodes, per token of a prompt and per pair of
    query and key. It is fitted to measured steps by least squares, none of the four being negative.

    Steps with tokens of prompts are not forgotten while sequences only decode. Those without are when others come, or
    one that was slow would count for as long as prompts wait.
    """

    def __init__(self) -> None:
        self._sums = {True: _Sums(), False: _Sums()}
        self._fitted: list[float] | None = None
        self.lately = 0.0
        """Tokens of prompts in the largest step of late."""
        self.deviation = 0.0
        """By how many seconds steps take longer than predicted, on average."""

    def observe(self, work: StepWork, seconds: float) -> None:
        """Take note of a step that took so many seconds."""
        sums, known = self._sums[work.prompt_tokens > 0], self.predict(work)
        if sums.count > 2 and known > 0:
            seconds = min(seconds, OUTLIER * known)
            self.deviation = MEMORY * self.deviation + (1 - MEMORY) * max(0.0, seconds - known)
        sums.add(_features(work), seconds)
        if work.prompt_tokens:
            self._sums[False].fade()
            self.lately = max(MEMORY * self.lately, float(work.prompt_tokens))
        self._fitted = None

    def predict(self, work: StepWork) -> float:
        """Seconds that a step is expected to take; 0 before any was measured."""
        return sum(c * f for c, f in zip(self.coefficients(), _features(work)))

    def coefficients(self) -> list[float]:
        """Seconds a step, and per unit of each of its numbers (`UNITS`)."""
        if self._fitted is None:
            both = self._sums[True].plus(self._sums[False])
            self._fitted = _solve_without_negatives(both.squares, both.products)
        return self._fitted

    def most_tokens(self, first: int, seconds: float) -> int:
        """The largest number of tokens of a prompt that take at most so many seconds beside what else is in a step.

        Args:
            first: tokens of the prompt that are computed already.
            seconds: what is left for them.
        """
        _, _, a_token, a_pair = (c * unit for c, unit in zip(self.coefficients(), UNITS))
        if seconds <= 0:
            return 0
        linear, square = a_token + a_pair * first, a_pair / 2
        if seconds == math.inf:
            return 2**31
        if square > 0:
            return int(min(2 * seconds / (math.sqrt(linear * linear + 4 * square * seconds) + linear), 2.0**31))
        return int(min(seconds / linear, 2.0**31)) if linear > 0 else 2**31


class PromptAllowance:
    """Tokens that prompts may have in one step.

    Args:
        limits: of the engine.
        times: of earlier steps.
        decoding: pairs of new rows and tokens before them of each sequence that decodes in the step; if there is none,
            nobody waits, and prompts may have every token.
    """

    def __init__(self, limits: Insertion, times: StepTimes, decoding: Sequence[tuple[int, int]]) -> None:
        self.times, self.used = times, 0
        self.most: float = math.inf
        self.seconds = math.inf
        if not decoding:
            return
        if limits.max_prompt_tokens_per_step is not None:
            self.most = limits.max_prompt_tokens_per_step
        if limits.max_inter_token_ms is not None:
            work = StepWork(sum(rows for rows, _ in decoding), 0, sum(map(count_pairs, decoding)))
            self.seconds = MARGIN * limits.max_inter_token_ms / 1000 - times.predict(work) - times.deviation
            self.most = min(self.most, max(FIRST_TOKENS, int(2 * times.lately)))

    def take(self, first: int, count: int) -> int:
        """How many of the next `count` tokens of a prompt the step takes, of which `first` are computed already."""
        left = self.most - self.used
        if self.seconds != math.inf:
            left = min(left, max(MIN_TOKENS - self.used, self.times.most_tokens(first, self.seconds)))
        found = int(max(0, min(count, left)))
        self.used += found
        if self.seconds != math.inf:
            self.seconds -= self.times.predict(StepWork(0, found, count_pairs((found, first))))
            self.seconds += self.times.coefficients()[0]  # the constant, which a step has once
        return found

    @property
    def is_used_up(self) -> bool:
        """Whether no prompt gets a token any more."""
        return self.used >= self.most or (self.used >= MIN_TOKENS and self.times.most_tokens(0, self.seconds) < 1)


class _Sums:
    """Sums of products of a step's numbers, older ones with less weight."""

    def __init__(self) -> None:
        size = len(UNITS)
        self.squares = [[0.0] * size for _ in range(size)]
        self.products = [0.0] * size
        self.count = 0

    def add(self, features: Sequence[float], seconds: float) -> None:
        self.fade()
        self.count += 1
        for i, f in enumerate(features):
            self.products[i] += f * seconds
            for j, g in enumerate(features):
                self.squares[i][j] += f * g

    def fade(self) -> None:
        self.products = [MEMORY * number for number in self.products]
        self.squares = [[MEMORY * number for number in row] for row in self.squares]

    def plus(self, other: _Sums) -> _Sums:
        both = _Sums()
        both.squares = [[a + b for a, b in zip(*rows)] for rows in zip(self.squares, other.squares)]
        both.products = [a + b for a, b in zip(self.products, other.products)]
        return both


def _features(work: StepWork) -> tuple[float, ...]:
    return tuple(number * unit for number, unit in zip((1.0, *work), UNITS))


def count_pairs(chunk: tuple[int, int]) -> float:
    """Pairs of a query and a key that it may see, of so many new rows behind so many tokens."""
    rows, before = chunk
    return rows * (before + rows / 2)


def _solve_without_negatives(squares: list[list[float]], products: list[float]) -> list[float]:
    """The coefficients with the least squared error, without those that would be negative."""
    used = list(range(len(products)))
    while True:
        found = _solve([[squares[i][j] + RIDGE * (i == j) for j in used] for i in used], [products[i] for i in used])
        if all(value >= 0 for value in found):
            out = [0.0] * len(products)
            for i, value in zip(used, found):
                out[i] = value
            return out
        used.pop(found.index(min(found)))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a symmetric positive definite system of a few equations by elimination."""
    n = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right)]
    for i in range(n):
        for j in range(i + 1, n):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i])]
    out = [0.0] * n
    for i in reversed(range(n)):
        out[i] = (rows[i][n] - sum(rows[i][j] * out[j] for j in range(i + 1, n))) / rows[i][i]
    return out
