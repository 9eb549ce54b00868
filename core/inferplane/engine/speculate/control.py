"""Whether drafting pays: how likely a draft has to be accepted to be made, by measured tokens a second.

What a draft costs depends on the device, on the method and on how many sequences are in a step; what it brings, on the
text. Neither is modelled. Each size of batch has a level, a least probability of acceptance. Levels are compared as
steps go on: some steps with one, then some with another, and the one that gave more tokens a second stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import mean, stdev

from inferplane.engine.request.state import Request

LEVELS = (0.0, 0.25, 0.45, 0.65, 0.8, 0.9, math.inf)
"""Least probabilities of acceptance with which drafts are made: always, ..., never."""
NEVER = len(LEVELS) - 1
FIRST_TRIED = (0, 3, NEVER)
"""Levels that are compared when a size of batch is new."""
SEGMENT_STEPS = 4
"""Steps with one level before another has its own."""
SEGMENTS, MOST_SEGMENTS = 4, 24
"""Least and most segments of each level in a comparison. Few sequences need many: what a step gives varies most."""
CLEAR_ERRORS = 3.0
"""From how many standard errors on a lead ends a comparison early."""
GAIN = 1.01
"""By which factor another level has to give more tokens a second."""
CLEAR_GAIN = 1.2
"""From which factor over no drafts at all these are not tried any more."""
LEAST_PAUSE, MOST_PAUSE = 8, 64
"""Segments between two comparisons: twice as many each time that nothing changes."""
TRIAL_STEPS, TRIAL_SHARE = 32, 4
"""Every so many steps one in so many sequences gets drafts whatever the level is, so that a better text is noticed."""
PRIOR = 0.7
"""Probability of acceptance before any draft was verified."""
PRIOR_TRIALS, MOST_TRIALS = 2.0, 16.0
"""Drafts that a sequence's first estimate counts for, and the most that are remembered of a sequence."""


@dataclass
class Acceptance:
    """Estimate of how likely the next draft of a sequence is accepted, if those before it are."""

    mean: float
    trials: float = PRIOR_TRIALS

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Count a verification: every accepted draft, and the first rejected one."""
        tried = min(num_drafts, num_accepted + 1)
        self.mean = (self.mean * self.trials + num_accepted) / (self.trials + tried)
        self.trials = min(self.trials + tried, MOST_TRIALS)


@dataclass
class LevelComparison:
    """Levels that are used one after the other, with what they gave. One that is clearly worse drops out.

    Args:
        levels: indices into `LEVELS`, the one in use first.
    """

    levels: list[int]
    segment: int = 0
    rates: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left = list(self.levels)
        """Levels that have not dropped out."""

    @property
    def level(self) -> int:
        """The one whose segment it is."""
        return self.left[self.segment]

    @property
    def is_over(self) -> bool:
        """Whether one level is left, or each had all its segments."""
        return len(self.left) == 1 or len(self.rates.get(self.left[-1], ())) >= MOST_SEGMENTS

    def add(self, tokens: int, seconds: float) -> None:
        """What a segment gave."""
        self.rates.setdefault(self.level, []).append(tokens / max(seconds, 1e-9))
        self.segment = (self.segment + 1) % len(self.left)
        if self.segment == 0 and len(self.rates[self.left[0]]) >= SEGMENTS:
            best = max(self.left, key=self.rate)
            self.left = [level for level in self.left if level == best or not self._is_clear(best, level)]

    def _is_clear(self, best: int, level: int) -> bool:
        """Whether the best level's lead is no chance: it is above `CLEAR_ERRORS` of its own standard errors. One in
        use has to be worse by `GAIN`, too."""
        leads = [math.log(max(a, 1e-9) / max(b, 1e-9)) for a, b in zip(self.rates[best], self.rates[level])]
        lead = mean(leads)
        least = math.log(GAIN) if level == self.levels[0] else 0.0
        return lead > max(least, CLEAR_ERRORS * stdev(leads) / math.sqrt(len(leads)))

    def find_best(self) -> int:
        """The level with the most tokens a second of those left; the one in use unless another is better by `GAIN`."""
        own, best = self.levels[0], max(self.left, key=self.rate)
        return own if own in self.left and self.rate(best) <= GAIN * self.rate(own) else best

    def rate(self, level: int) -> float:
        """Tokens a second that a level gave."""
        return mean(self.rates[level])


@dataclass
class BatchLevel:
    """The level of one size of batch.

    Args:
        level: index into `LEVELS`.
        comparison: what is compared now; None: nothing.
        pause: segments between two comparisons. waited: segments since the last one. compared: their number.
        worth: tokens a second with this level, over those without drafts, when these were compared last.
    """

    level: int
    comparison: LevelComparison | None = None
    pause: int = LEAST_PAUSE
    waited: int = 0
    compared: int = 0
    worth: float = 1.0

    @property
    def now(self) -> int:
        """The level of the present segment."""
        return self.level if self.comparison is None else self.comparison.level

    def end_segment(self, tokens: int, seconds: float) -> None:
        """Count a segment, and begin or end a comparison."""
        if self.comparison is None:
            self.waited += 1
            if self.waited >= self.pause:
                self._begin()
            return
        self.comparison.add(tokens, seconds)
        if not self.comparison.is_over:
            return
        best = self.comparison.find_best()
        self.pause = min(2 * self.pause, MOST_PAUSE) if best == self.level else LEAST_PAUSE
        if NEVER in self.comparison.levels:
            self.worth = self.comparison.rate(best) / max(self.comparison.rate(NEVER), 1e-9)
        self.level, self.comparison, self.waited = best, None, 0

    def _begin(self) -> None:
        """Compare the level with a neighbour, or with no drafts at all unless it was clearly better than these."""
        for _ in range(4):
            self.compared += 1
            other = NEVER if self.compared % 2 == 0 else self.level + (1 if self.compared % 4 == 1 else -1)
            if other != self.level and 0 <= other <= NEVER and (other != NEVER or self.worth < CLEAR_GAIN):
                self.comparison = LevelComparison([self.level, other])
                return


class DraftControl:
    """Limits drafts so that they pay.

    Args:
        maximum: most drafts of a sequence in a step.
        trial_tokens: most generated tokens of a sequence that gets drafts for a trial.
        preserves: whether drafts never change which tokens are drawn. If not, requests with a seed are not limited, or
            their text would depend on the time of day.
    """

    def __init__(self, maximum: int, trial_tokens: int, preserves: bool = True) -> None:
        self.maximum, self.trial_tokens, self.preserves, self.steps = maximum, trial_tokens, preserves, 0
        self.batches: dict[int, BatchLevel] = {}
        self.overall = Acceptance(PRIOR, PRIOR_TRIALS)
        self._of: dict[int | str, Acceptance] = {}
        self._size, self._segment_steps, self._tokens, self._seconds = 0, 0, 0, 0.0

    @property
    def least(self) -> float:
        """The least probability of acceptance with which drafts are made now."""
        return LEVELS[self.batches[self._size].now] if self._size in self.batches else 0.0

    @property
    def is_paused(self) -> bool:
        """Whether drafts are made for trials alone, and have been before this segment."""
        return self._size in self.batches and self.batches[self._size].level == NEVER and self.least == math.inf

    def limit(self, request: Request) -> int:
        """The most drafts that the next step may have for a sequence."""
        least = self.least
        params = request.params
        is_seeded = not self.preserves and params.seed is not None and params.temperature > 0
        if least == 0 or is_seeded:
            return self.maximum
        is_trial = self._is_trial(request)
        if least == math.inf:
            return int(is_trial)
        mean = min(self._of.get(request.request_id, self.overall).mean, 0.999)
        found = int(math.log(least) / math.log(mean)) if mean > 0 else 0
        return min(self.maximum, max(found, int(is_trial)))

    def _is_trial(self, request: Request) -> bool:
        trial, step = divmod(self.steps, TRIAL_STEPS)
        is_due = step == 0 and (request.arrival + trial) % TRIAL_SHARE == 0
        return is_due and len(request.generated) <= self.trial_tokens

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Count a verification of a sequence's drafts."""
        of = self._of.setdefault(request.request_id, Acceptance(self.overall.mean))
        for known in (of, self.overall):
            known.observe(num_drafts, num_accepted)

    def observe_step(self, sequences: int, tokens: int, seconds: float, drafting_seconds: float = 0.0) -> None:
        """Count a step of sequences that decode, with the tokens that it gave and the seconds that it took, of which
        `drafting_seconds` for drafting."""
        self.steps += 1
        if self.least == math.inf:
            seconds -= drafting_seconds  # a drafter's entries, kept for the next level alone: a pause writes none
        size = sequences.bit_length()
        if size != self._size:  # a segment with both sizes says nothing
            self._size = size
            self._restart()
            if size not in self.batches:
                near = min(self.batches, key=lambda other: abs(other - size), default=None)
                level = 0 if near is None else self.batches[near].level
                first = [level, *(other for other in FIRST_TRIED if other != level)]
                self.batches[size] = BatchLevel(level, LevelComparison(first))
            return
        self._segment_steps += 1
        if self._segment_steps == 1:
            return  # it verified drafts that the last segment made
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        if self._segment_steps > SEGMENT_STEPS:
            self.batches[size].end_segment(self._tokens, self._seconds)
            self._restart()

    def _restart(self) -> None:
        self._segment_steps, self._tokens, self._seconds = 0, 0, 0.0

    def forget(self, request: Request) -> None:
        """Drop the estimate of a request that has ended."""
        self._of.pop(request.request_id, None)
