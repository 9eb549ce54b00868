"""Runs jobs on an engine in the caller's thread and times every step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from inferplane.cli.verbs.bench.workload import BenchJob
from inferplane.engine import SamplingParams
from inferplane.engine.loop.engine import Engine
from inferplane.engine.request.seeds import as_int64
from inferplane.engine.request.state import Request
from inferplane.errors import GenerationError

MAX_SLEEP_S = 0.01
Clock = Callable[[], float]
OnDone = Callable[[], None]


@dataclass
class JobTiming:
    """The times of one job, in seconds after the run began.

    Args:
        prompt_tokens: number of tokens of its prompt.
        due_s: when it arrived, also if a running step delayed its start.
        arrivals: `(when, how many tokens)` for each step that generated tokens for it.
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
        """Mean seconds per token after the tokens of the first step; None without such tokens."""
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
        spent_s: its duration in seconds.
        batch: sequences that were scheduled, including those that ended in this step.
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
    """One run: its jobs in order, its steps, the number of KV blocks, and `ids`, the generated tokens by job."""

    sequences: list[JobTiming]
    steps: list[StepTiming]
    total_blocks: int
    ids: list[list[int]] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last token."""
        return max(s.arrivals[-1][0] for s in self.sequences)


def run_jobs(
    engine: Engine,
    jobs: Sequence[BenchJob],
    params: SamplingParams,
    on_done: OnDone,
    batch: int | None = None,
    clock: Clock = time.perf_counter,
) -> Trace:
    """Run jobs with continuous batching: a job joins when it has arrived and blocks are free, and leaves when it ends.

    Or run them in fixed batches in order of arrival: a batch starts when the longest job of the last one has ended. A
    job that has ended only leaves its position empty; a padded batch would also compute its rows.

    Args:
        engine: an idle engine.
        jobs: in order of arrival.
        params: sampling parameters; each job sets its own length and seed.
        on_done: called when a job has ended.
        batch: number of jobs in a fixed batch; None for continuous batching.
        clock: returns seconds; it must advance while nothing runs if jobs arrive later.

    Raises:
        CapacityError: a job can never run; no job has started.
        GenerationError: a job failed while it ran.
    """
    return _JobRunner(engine, jobs, params, on_done, clock).all(batch or len(jobs))


class _JobRunner:
    def __init__(
        self, engine: Engine, jobs: Sequence[BenchJob], params: SamplingParams, on_done: OnDone, clock: Clock
    ) -> None:
        self.engine, self.jobs, self.params, self.on_done, self.clock = engine, jobs, params, on_done, clock
        self.sequences = [JobTiming(len(job.prompt), job.due_s) for job in jobs]
        self.steps: list[StepTiming] = []
        self.index_of: dict[int, int] = {}
        self.seen: list[int] = [0] * len(jobs)
        self.requests: list[Request] = []

    def all(self, batch: int) -> Trace:
        for job in self.jobs:
            self.engine.check(job.prompt)
            self.engine.scheduler.check(len(job.prompt), job.output_tokens)
        self.begun = self.clock()
        numbered = list(enumerate(self.jobs))
        try:
            for start in range(0, len(numbered), batch):
                self._group(deque(numbered[start : start + batch]))
        finally:
            for request in self.requests:
                self.engine.end(request, "abort")
        return Trace(self.sequences, self.steps, self.engine.pools.total, [r.generated for r in self.requests])

    def _now(self) -> float:
        return self.clock() - self.begun

    def _group(self, waiting: deque[tuple[int, BenchJob]]) -> None:
        while waiting or self.engine.busy:
            while waiting and waiting[0][1].due_s <= self._now():
                self._add(*waiting.popleft())
            if self.engine.busy:
                self._step()
            elif waiting:
                time.sleep(min(max(0.0, waiting[0][1].due_s - self._now()), MAX_SLEEP_S))

    def _add(self, index: int, job: BenchJob) -> None:
        seed = None if self.params.seed is None else as_int64(self.params.seed + index)
        params = replace(self.params, max_tokens=job.output_tokens, ignore_eos=True, seed=seed)
        request = self.engine.add(job.prompt, params, frozenset())
        self.index_of[id(request)] = index
        self.requests.append(request)

    def _step(self) -> None:
        begun = self.clock()
        changed = self.engine.step()
        ended = self.clock()
        new_tokens = ended_jobs = 0
        for request in changed:
            index = self.index_of[id(request)]
            if request.finish_reason in ("error", "timeout", "abort"):
                raise GenerationError(
                    f"Request {index} ended with {request.finish_reason!r} while it was timed: {request.error}."
                )
            new = len(request.generated) - self.seen[index]
            self.seen[index] += new
            new_tokens += new
            self.sequences[index].arrivals.append((ended - self.begun, new))
            if request.finish_reason is not None:
                ended_jobs += 1
                self.on_done()
        running = len(self.engine.scheduler.running) + ended_jobs
        used = self.engine.pools.used
        self.steps.append(StepTiming(ended - self.begun, ended - begun, running, used, new_tokens))
