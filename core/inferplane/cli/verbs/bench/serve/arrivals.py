"""Times at which requests are sent: at a constant pace, as a Poisson process, in bursts, or at a rate that grows.

Gaps of mean 1 are drawn first and added up. A rate turns that count of expected requests into seconds, so that every
process can run at every rate, also a changing one (the time change of a point process).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from inferplane.errors import UsageError

FORMS = "poisson, constant, gamma:SHAPE (a shape below 1 makes bursts, 1 is poisson)"
MIN_SHAPE, MAX_SHAPE = 1e-3, 1e6
"""Of a gamma distribution: with shapes far beyond these its method of drawing loses its numbers, and never returns."""
MIN_RATE, MAX_RATE = 1e-6, 1e9
"""Requests a second that a rate may have, so that no time overflows; one end of a ramp may be 0."""


@dataclass(frozen=True)
class Rate:
    """Requests a second: constant, infinite (all at once), or linear between two over the whole run.

    Args:
        first: at the beginning.
        last: at the end; the same for a constant rate.
    """

    first: float
    last: float

    @property
    def is_ramp(self) -> bool:
        """Whether the rate changes."""
        return self.first != self.last

    def seconds(self, number: float, length_s: float) -> float:
        """Return when so many requests are expected to have been sent.

        Args:
            number: of requests, by their mean.
            length_s: of the run, in seconds; after it the rate stays as it is.
        """
        if math.isinf(self.first) or number <= 0:
            return 0.0
        if not self.is_ramp:
            return number / self.first
        total = (self.first + self.last) / 2 * length_s
        if number >= total:
            return length_s + (number - total) / self.last if self.last else math.inf
        slope = (self.last - self.first) / length_s
        return 2 * number / (self.first + math.sqrt(self.first**2 + 2 * slope * number))

    def length_of(self, num_requests: int) -> float:
        """Return the seconds in which so many requests are expected."""
        return 0.0 if math.isinf(self.first) else num_requests / ((self.first + self.last) / 2)

    def __str__(self) -> str:
        return f"{self.first:g}:{self.last:g}" if self.is_ramp else f"{self.first:g}"


def parse_rate(words: str) -> Rate:
    """Parse `R`, `inf` or `R1:R2`.

    Raises:
        UsageError: it is none of these, or not above 0.
    """
    wrong = UsageError(
        f"--rate {words!r}.",
        there_is=f"requests a second from {MIN_RATE:g} to {MAX_RATE:g}, inf (all at once), R1:R2 (from R1 to R2)",
    )
    first, colon, last = words.partition(":")
    try:
        rate = Rate(float(first), float(last if colon else first))
    except ValueError:
        raise wrong from None
    limited = all(value == 0 or MIN_RATE <= value <= MAX_RATE for value in (rate.first, rate.last))
    if not (limited and rate.first + rate.last > 0) and words != "inf":
        raise wrong
    return rate


@dataclass(frozen=True)
class Process:
    """How gaps between requests vary.

    Args:
        shape: of a gamma distribution with mean 1; infinite: gaps are equal.
    """

    shape: float

    def draw_gaps(self, source: random.Random) -> Iterator[float]:
        """Yield gaps of mean 1 for ever."""
        while True:
            yield 1.0 if math.isinf(self.shape) else source.gammavariate(self.shape, 1 / self.shape)

    def __str__(self) -> str:
        return {math.inf: "constant", 1.0: "poisson"}.get(self.shape, f"gamma:{self.shape:g}")


def parse_process(words: str) -> Process:
    """Parse `poisson`, `constant` or `gamma:SHAPE`.

    Raises:
        UsageError: it is none of these.
    """
    named = {"poisson": 1.0, "constant": math.inf}
    if words in named:
        return Process(named[words])
    kind, _, number = words.partition(":")
    try:
        shape = float(number)
    except ValueError:
        shape = 0.0
    if kind != "gamma" or not MIN_SHAPE <= shape <= MAX_SHAPE:
        raise UsageError(f"--arrivals {words!r}.", there_is=f"{FORMS}; SHAPE is from {MIN_SHAPE:g} to {MAX_SHAPE:g}")
    return Process(shape)


def due_times(rate: Rate, process: Process, length_s: float, seed: int) -> Iterator[float]:
    """Yield the seconds after the run's beginning at which requests are due; the first one at 0.

    Args:
        rate: of the requests.
        process: of the gaps between them.
        length_s: over which a rate changes.
        seed: of the gaps.
    """
    source, number = random.Random(f"arrivals {seed}"), 0.0
    yield 0.0
    for gap in process.draw_gaps(source):
        number += gap
        yield rate.seconds(number, length_s)
