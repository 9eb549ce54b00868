"""Lengths of prompts and outputs: a number, a range, or an exponential distribution."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from inferplane.errors import UsageError

FORMS = "N, LOW-HIGH (uniform), exp:MEAN and exp:MEAN:MAX (exponential, limited to MAX)"


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens.

    Args:
        kind: "fixed", "uniform" or "exponential".
        low: the minimum; the value itself for "fixed".
        high: the maximum; None without one.
        mean: of the exponential distribution before rounding and cutting; 0 for the others.
    """

    kind: str
    low: int
    high: int | None
    mean: float = 0.0

    def draw(self, source: random.Random) -> int:
        """One length, at least 1."""
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            assert self.high is not None
            return source.randint(self.low, self.high)
        # Rounded up, so that nothing is empty.
        drawn = 1 + int(source.expovariate(1 / self.mean))
        return drawn if self.high is None else min(drawn, self.high)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return str(self.low)
        if self.kind == "uniform":
            return f"{self.low}-{self.high}"
        return f"exp:{self.mean:g}" + ("" if self.high is None else f":{self.high}")


def parse_lengths(words: str, flag: str = "") -> Lengths:
    """Parse a length option: "128", "16-256", "exp:64", "exp:64:512".

    Args:
        words: the value. flag: the option, for the message.

    Raises:
        UsageError: the value has none of these forms, or allows a length below 1.
    """
    wrong = UsageError(f"{flag and f'{flag} '}{words!r} is no length in tokens.", there_is=FORMS)
    if match := re.fullmatch(r"(\d+)(?:-(\d+))?", words):
        low, high = int(match[1]), int(match[2] or match[1])
        if not 1 <= low <= high:
            raise wrong
        return Lengths("uniform", low, high) if match[2] else Lengths("fixed", low, low)
    if match := re.fullmatch(r"exp:(\d+(?:\.\d+)?)(?::(\d+))?", words):
        mean, maximum = float(match[1]), int(match[2]) if match[2] else None
        if mean <= 0 or (maximum is not None and maximum < 1):
            raise wrong
        return Lengths("exponential", 1, maximum, mean)
    raise wrong
