"""Finds the fastest of several kernels: checks each, times it, and prefers it only if the gain exceeds the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inferplane.binding.check import Bench, bind_case, run_case
from inferplane.binding.lock import signature
from inferplane.binding.plan import Plan
from inferplane.ops import Op, Sample
from inferplane.types import Kernel, StepKind

TOKENS: Mapping[StepKind, tuple[int, ...]] = {"decode": (1, 16, 64), "mixed": (512,)}
"""Token rows per step kind on which kernels are timed. One choice holds for all of them."""
ROUNDS = 7
"""Number of times that each kernel is measured, alternating with the others."""
MIN_MEASUREMENT_S = 2e-3
"""Shortest measurement; shorter calls are repeated."""
MAX_CALLS = 256
MIN_GAIN = 0.03
"""A kernel that gains a smaller fraction is not preferred, even without noise."""

Clock = Callable[[], float]
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Work -> a function that runs it again: captured by the device, or unchanged."""


@dataclass
class KernelTiming:
    """Checks and times of one kernel at one site.

    Args:
        kernel: its name.
        error: largest error of its checks.
        tolerance: largest error that the op accepts.
        wrong: why it is excluded; empty if every check passed.
        seconds: rows of the step -> a call's time in each round.
    """

    kernel: str
    error: float = 0.0
    tolerance: float = 0.0
    wrong: str = ""
    seconds: dict[int, list[float]] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Geometric mean over the step sizes of the median time, in seconds."""
        return math.exp(statistics.fmean(math.log(statistics.median(s)) for s in self.seconds.values()))

    @property
    def noise(self) -> float:
        """Median deviation from the median time, as a fraction of it; the largest over the step sizes."""
        return max(map(_noise, self.seconds.values()))


def _noise(seconds: Sequence[float]) -> float:
    middle = statistics.median(seconds)
    return statistics.median(abs(s - middle) for s in seconds) / middle


@dataclass(frozen=True)
class Tuned:
    """The result at one site, which holds for all sites with its signature.

    Args:
        key: the entry's key in the lock file.
        site: the first such site.
        before: the kernel that ranks chose.
        chosen: the kernel for the lock file.
        timings: of every kernel.
    """

    key: str
    site: str
    before: str
    chosen: str
    timings: tuple[KernelTiming, ...]


def choose(before: str, timings: Sequence[KernelTiming]) -> str:
    """The fastest correct kernel if it gains more over `before` than the noise of both and `MIN_GAIN`; else
    `before`."""
    right = [t for t in timings if not t.wrong]
    if not right:
        return before
    best = min(right, key=lambda t: t.score)
    present = next((t for t in right if t.kernel == before), None)
    if present is None:
        return best.kernel
    gain = 1 - best.score / present.score
    return best.kernel if gain > max(MIN_GAIN, best.noise + present.noise) else before


def alternatives(plan: Plan) -> Iterator[tuple[StepKind, str, Op, list[Kernel]]]:
    """`(step kind, first site, op, kernels)` of every site that accepts several kernels, the present one first.

    Excluded are kernels that compute in fewer bits than requested, sites that a pin decided, and ops that are not
    `tunable`.
    """
    for kind, site, op, choice in plan.distinct():
        if choice.kernel is None or choice.pin is not None or choice.dequantize != "never" or not op.tunable:
            continue
        resolver = plan.resolvers[kind]
        others = [
            k
            for k in resolver.by_op[op.name]
            if k is not choice.kernel
            and not (k.is_less_precise_than(op) or k in resolver.options.demoted or resolver.refused.get((op.key(), k)))
            and not k.refusals(op, resolver.ctx, op.formats())
        ]
        if others:
            yield kind, site, op, [choice.kernel, *others]


def tune(
    plan: Plan, bench: Bench, clock: Clock, capture: Capture, report: Callable[[Tuned], None] = lambda tuned: None
) -> list[Tuned]:
    """Check and time the kernels of every site that has several.

    Args:
        plan: of the model, on the opened device.
        bench: where cases run.
        clock: seconds; waits for launched work.
        capture: how work is run again.
        report: called with each result as soon as it is known.
    """
    found = []
    for kind, site, op, kernels in alternatives(plan):
        timings = [KernelTiming(k.name) for k in kernels]
        for tokens in TOKENS[kind]:
            sample = Sample(f"{tokens} rows", op, lambda d, op=op, n=tokens: op.tuning_inputs(d, n), kind)  # type: ignore[misc]
            _check(kernels, timings, sample, bench)
            _time(kernels, timings, sample, bench, tokens, clock, capture)
        key = f"{op.name}|{kind}|{signature(op)}"
        outcome = Tuned(key, site, kernels[0].name, choose(kernels[0].name, timings), tuple(timings))
        report(outcome)
        found.append(outcome)
    return found


def _check(kernels: Sequence[Kernel], timings: Sequence[KernelTiming], sample: Sample, bench: Bench) -> None:
    for kernel, timing in zip(kernels, timings):
        if timing.wrong:
            continue
        outcome = run_case(kernel, sample, bench, seed=1)
        timing.error, timing.tolerance = max(timing.error, outcome.error), outcome.tolerance
        if not outcome.passed:
            what = outcome.detail or "result"
            timing.wrong = f"{sample.label}: {what}; error {outcome.error:.3g}, tolerance {outcome.tolerance:.3g}"


def _time(
    kernels: Sequence[Kernel],
    timings: Sequence[KernelTiming],
    sample: Sample,
    bench: Bench,
    tokens: int,
    clock: Clock,
    capture: Capture,
) -> None:
    """Time in rounds, so that a temporary slowdown of the machine affects all kernels."""
    runs = {}
    for kernel, timing in zip(kernels, timings):
        if not timing.wrong:
            function, args = bind_case(kernel, sample, bench, seed=1)
            runs[timing.kernel] = _repeat(lambda f=function, a=args: f(*a), kernel, clock, capture)  # type: ignore[misc]
    for _ in range(ROUNDS):
        for timing in timings:
            if timing.kernel in runs:
                again, calls = runs[timing.kernel]
                timing.seconds.setdefault(tokens, []).append(_measure(again, clock) / calls)


def _repeat(call: Callable[[], Any], kernel: Kernel, clock: Clock, capture: Capture) -> tuple[Callable[[], Any], int]:
    """A function that calls often enough to last `MIN_MEASUREMENT_S`, and the number of calls."""
    call()
    calls = 1
    while True:
        again = _times(call, calls)
        again = capture(again) if kernel.capture_safe else again
        again()
        seconds = _measure(again, clock)
        if seconds >= MIN_MEASUREMENT_S or calls >= MAX_CALLS:
            return again, calls
        calls = min(MAX_CALLS, max(2 * calls, math.ceil(calls * MIN_MEASUREMENT_S / max(seconds, 1e-7))))


def _times(call: Callable[[], Any], calls: int) -> Callable[[], Any]:
    def run() -> Any:
        result = None
        for _ in range(calls):
            result = call()
        return result

    return run


def _measure(work: Callable[[], Any], clock: Clock) -> float:
    begin = clock()
    work()
    return max(clock() - begin, 1e-9)
