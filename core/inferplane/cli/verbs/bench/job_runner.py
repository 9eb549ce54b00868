"""Running jobs on an engine, in the caller's thread, with the clock at hand."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inferplane.cli.verbs.bench.workload import BenchJob
from inferplane.engine import SamplingParams
from inferplane.engine.engine import Engine
from inferplane.engine.request import Request
from inferplane.errors import GenerationError

LONGEST_NAP_S = 0.01
Clock = Callable[[], float]


@dataclass
class JobTiming:
    """How one job went. Times are seconds after the run began.

    Args:
        prompt_tokens: tokens of its prompt.
        due_s: when it arrived. What waits for a step that is under way has arrived nevertheless.
        arrivals: `(when, how many tokens)` for each step that brought it tokens.
    """

    prompt_tokens: int
    due_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def output_tokens(self) -> int:
        """Tokens generated."""
        return sum(n for _, n in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """From its arrival to its first token."""
        return self.arrivals[0][0] - self.due_s

    @property
    def e2e_s(self) -> float:
        """From its arrival to its last token."""
        return self.arrivals[-1][0] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds a token after those of the first step; None when there are none."""
        later = self.output_tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one step that brought it tokens and the next."""
        return [b[0] - a[0] for a, b in zip(self.arrivals, self.arrivals[1:])]


@dataclass(frozen=True)
class StepTiming:
    """One engine step.

    Args:
        end_s: when it ended, in seconds after the run began.
        spent_s: how long it took.
        batch: sequences that were running after it began to be scheduled, those that ended in it included.
        used_blocks: KV blocks in use after it.
        tokens: tokens it generated.
    """

    end_s: float
    spent_s: float
    batch: int
    used_blocks: int
    tokens: int


@dataclass
class Trace:
    """A run: its jobs in their order, its steps, and how many KV blocks there are.

    `ids` are the tokens that were generated, job by job.
    """

    sequences: list[JobTiming]
    steps: list[StepTiming]
    total_blocks: int
    ids: list[list[int]] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last token."""
        return max(s.arrivals[-1][0] for s in self.sequences)


def run_continuous(
    engine: Engine,
    jobs: Sequence[BenchJob],
    params: SamplingParams,
    told: Callable[[], None],
    clock: Clock = time.perf_counter,
) -> Trace:
    """Jobs join as they arrive and as there is room, and leave when they end.

    Args:
        engine: nothing else runs on it.
        jobs: by arrival.
        params: how to sample; lengths and seeds are the jobs'.
        told: called when a job has ended.
        clock: seconds; jobs that arrive later want one that goes on while nothing runs.

    Raises:
        CapacityError: a job could never run; nothing has been run then.
        GenerationError: a job failed while it ran.
    """
    return _Run(engine, jobs, params, told, clock).all([len(jobs)])


def run_static(
    engine: Engine,
    jobs: Sequence[BenchJob],
    params: SamplingParams,
    told: Callable[[], None],
    batch: int,
    clock: Clock = time.perf_counter,
) -> Trace:
    """Fixed batches in order of arrival: the next one begins when the longest job of this one has ended.

    Jobs that have ended cost their batch nothing but their place; a padded batch would also compute their rows.

    Args and errors: as `run_continuous`; `batch` is the number of jobs in a batch.
    """
    return _Run(engine, jobs, params, told, clock).all([min(batch, len(jobs) - i) for i in range(0, len(jobs), batch)])


class _Run:
    def __init__(
        self,
        engine: Engine,
        jobs: Sequence[BenchJob],
        params: SamplingParams,
        told: Callable[[], None],
        clock: Clock,
    ) -> None:
        self.engine, self.jobs, self.params, self.told, self.clock = engine, jobs, params, told, clock
        self.sequences = [JobTiming(len(job.prompt), job.due_s) for job in jobs]
        self.steps: list[StepTiming] = []
        self.places: dict[int, int] = {}
        self.seen: list[int] = [0] * len(jobs)
        self.requests: list[Request] = []

    def all(self, groups: list[int]) -> Trace:
        for job in self.jobs:
            self.engine.check(job.prompt)
            self.engine.scheduler.check(len(job.prompt), job.output_tokens)
        self.begun = self.clock()
        coming = deque(enumerate(self.jobs))
        try:
            for group in groups:
                self._group([coming.popleft() for _ in range(group)])
        finally:
            for request in self.requests:
                self.engine.end(request, "abort")
        return Trace(self.sequences, self.steps, self.engine.allocator.total, [r.generated for r in self.requests])

    def _now(self) -> float:
        return self.clock() - self.begun

    def _group(self, jobs: list[tuple[int, BenchJob]]) -> None:
        waiting = deque(jobs)
        while waiting or self.engine.busy:
            while waiting and waiting[0][1].due_s <= self._now():
                self._add(*waiting.popleft())
            if self.engine.busy:
                self._step()
            elif waiting:
                time.sleep(min(max(0.0, waiting[0][1].due_s - self._now()), LONGEST_NAP_S))

    def _add(self, place: int, job: BenchJob) -> None:
        params = _with(self.params, job.output_tokens, place)
        request = self.engine.add(job.prompt, params, frozenset())
        self.places[id(request)] = place
        self.requests.append(request)

    def _step(self) -> None:
        begun = self.clock()
        touched = self.engine.step()
        ended = self.clock()
        new_tokens = left = 0
        for request in touched:
            place = self.places[id(request)]
            if request.finish_reason in ("error", "timeout", "abort"):
                raise GenerationError(
                    f"Request {place} ended with {request.finish_reason!r} while it was timed: {request.error}."
                )
            new = len(request.generated) - self.seen[place]
            self.seen[place] += new
            new_tokens += new
            self.sequences[place].arrivals.append((ended - self.begun, new))
            if request.finish_reason is not None:
                left += 1
                self.told()
        running = len(self.engine.scheduler.running) + left
        used = self.engine.allocator.used
        self.steps.append(StepTiming(ended - self.begun, ended - begun, running, used, new_tokens))


def _with(params: SamplingParams, tokens: int, place: int) -> SamplingParams:
    from dataclasses import replace

    seed = None if params.seed is None else params.seed + place
    return replace(params, max_tokens=tokens, ignore_eos=True, seed=seed)
