"""Which of several kernels is the fastest here: each is checked first, then timed, and taken only beyond noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from inferplane.binding.check import Bench, bound_case, run_case
from inferplane.binding.lock import signature
from inferplane.binding.plan import Plan
from inferplane.ops import Draw, Op, Sample
from inferplane.types import Kernel, StepKind

TOKENS: Mapping[StepKind, tuple[int, ...]] = {"decode": (1, 16, 64), "mixed": (512,)}
"""Rows of a step of each kind that kernels are timed on. A choice is one for all of them."""
ROUNDS = 7
"""Times that each kernel is measured, in turn with the others."""
LEAST_S = 2e-3
"""A measurement lasts at least so long; shorter calls are repeated."""
MOST_CALLS = 256
LEAST_GAIN = 0.03
"""What is less than so much faster is not preferred, however quiet the machine."""
MOST_EXPERTS = 8

Clock = Callable[[], float]
Record = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Takes work, and returns how to run it again: recorded by the device, or as it is."""


@dataclass
class Trial:
    """One kernel at one site.

    Args:
        kernel: its name.
        error: the worst of its checks.
        tolerance: what the op allows.
        wrong: why it is out; empty when every check passed.
        seconds: by rows of the step: a call's time in each round.
    """

    kernel: str
    error: float = 0.0
    tolerance: float = 0.0
    wrong: str = ""
    seconds: dict[int, list[float]] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Geometric mean over the sizes of the median time, in seconds."""
        return math.exp(statistics.fmean(math.log(statistics.median(s)) for s in self.seconds.values()))

    @property
    def noise(self) -> float:
        """The largest share by which half of the rounds differ from the median."""
        return max(map(_noise, self.seconds.values()))


def _noise(seconds: Sequence[float]) -> float:
    middle = statistics.median(seconds)
    return statistics.median(abs(s - middle) for s in seconds) / middle


@dataclass(frozen=True)
class Tuned:
    """The outcome at one site, which stands for all that are alike.

    Args:
        key: of the lock file.
        site: the first such site.
        before: the kernel that ranks chose.
        chosen: the kernel that the lock file takes.
        trials: of every kernel.
    """

    key: str
    site: str
    before: str
    chosen: str
    trials: tuple[Trial, ...]


def choose(before: str, trials: Sequence[Trial]) -> str:
    """The fastest right kernel, where it is faster than `before` by more than both vary and than `LEAST_GAIN`."""
    right = [t for t in trials if not t.wrong]
    if not right:
        return before
    best = min(right, key=lambda t: t.score)
    present = next((t for t in right if t.kernel == before), None)
    if present is None:
        return best.kernel
    gain = 1 - best.score / present.score
    return best.kernel if gain > max(LEAST_GAIN, best.noise + present.noise) else before


def alternatives(plan: Plan) -> Iterator[tuple[StepKind, str, Op, list[Kernel]]]:
    """`(step kind, first site, op, kernels)` wherever a plan could take several kernels, the present one first.

    Left out are kernels that compute in fewer bits than is asked for, what a pin decided, and ops whose inputs are not
    known from their fields.
    """
    for kind, site, op, choice in plan.distinct():
        if choice.kernel is None or choice.pin is not None or choice.expand != "never" or op.name not in INPUTS:
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
    plan: Plan, bench: Bench, clock: Clock, record: Record, told: Callable[[Tuned], None] = lambda tuned: None
) -> list[Tuned]:
    """Check and time the kernels of every site that has several.

    Args:
        plan: of the model, on the opened device.
        bench: where cases run.
        clock: seconds, once everything launched has ended.
        record: how work is run again.
        told: is given each outcome as it comes.
    """
    found = []
    for kind, site, op, kernels in alternatives(plan):
        trials = [Trial(k.name) for k in kernels]
        for tokens in TOKENS[kind]:
            sample = Sample(f"{tokens} rows", op, lambda d, op=op, n=tokens: INPUTS[op.name](op, d, n), kind)  # type: ignore[misc]
            _judge(kernels, trials, sample, bench)
            _time(kernels, trials, sample, bench, tokens, clock, record)
        key = f"{op.name}|{kind}|{signature(op)}"
        outcome = Tuned(key, site, kernels[0].name, choose(kernels[0].name, trials), tuple(trials))
        told(outcome)
        found.append(outcome)
    return found


def _judge(kernels: Sequence[Kernel], trials: Sequence[Trial], sample: Sample, bench: Bench) -> None:
    for kernel, trial in zip(kernels, trials):
        if trial.wrong:
            continue
        outcome = run_case(kernel, sample, bench, seed=1)
        trial.error, trial.tolerance = max(trial.error, outcome.error), outcome.tolerance
        if not outcome.passed:
            what = outcome.detail.removeprefix("! ") or "result"
            trial.wrong = f"{sample.label}: {what}; error {outcome.error:.3g}, tolerance {outcome.tolerance:.3g}"


def _time(
    kernels: Sequence[Kernel],
    trials: Sequence[Trial],
    sample: Sample,
    bench: Bench,
    tokens: int,
    clock: Clock,
    record: Record,
) -> None:
    """In rounds, so that what slows the machine down for a while slows all kernels down."""
    runs = {}
    for kernel, trial in zip(kernels, trials):
        if not trial.wrong:
            function, args = bound_case(kernel, sample, bench, seed=1)
            runs[trial.kernel] = _repeated(lambda f=function, a=args: f(*a), kernel, clock, record)  # type: ignore[misc]
    for _ in range(ROUNDS):
        for trial in trials:
            if trial.kernel in runs:
                again, calls = runs[trial.kernel]
                trial.seconds.setdefault(tokens, []).append(_once(again, clock) / calls)


def _repeated(call: Callable[[], Any], kernel: Kernel, clock: Clock, record: Record) -> tuple[Callable[[], Any], int]:
    """So many calls as last `LEAST_S`, and their number."""
    call()
    calls = 1
    while True:
        again = _times(call, calls)
        again = record(again) if kernel.capture_safe else again
        again()
        taken = _once(again, clock)
        if taken >= LEAST_S or calls >= MOST_CALLS:
            return again, calls
        calls = min(MOST_CALLS, max(2 * calls, math.ceil(calls * LEAST_S / max(taken, 1e-7))))


def _times(call: Callable[[], Any], calls: int) -> Callable[[], Any]:
    def run() -> Any:
        result = None
        for _ in range(calls):
            result = call()
        return result

    return run


def _once(work: Callable[[], Any], clock: Clock) -> float:
    begin = clock()
    work()
    return max(clock() - begin, 1e-9)


def _rows(width: Callable[[Any], int]) -> Callable[[Any, Draw, int], tuple[Any, ...]]:
    return lambda op, d, n: (d.normal(n, width(op)),)


def _experts(op: Any, d: Draw, n: int) -> tuple[Any, ...]:
    count, width = op.gate_up.shape[0], op.gate_up.shape[-1]
    ids = torch.stack([torch.tensor(d.permutation(count)[: min(MOST_EXPERTS, count)]) for _ in range(n)])
    return d.normal(n, width), d.uniform(*ids.shape, low=0.1), ids.to(d.device)


INPUTS: Mapping[str, Callable[[Any, Draw, int], tuple[Any, ...]]] = {
    "rms_norm": _rows(lambda op: int(op.weight.shape[0])),
    "linear": _rows(lambda op: int(op.weight.shape[-1])),
    "gated_mlp": _rows(lambda op: int(op.gate_up.weight.shape[-1])),
    "moe_experts": _experts,
    "add_rms_norm": lambda op, d, n: (d.normal(n, op.norm.weight.shape[0]), d.normal(n, op.norm.weight.shape[0])),
}
"""Ops that are tuned, and what their calls are given: `(op, draw, rows)`. An expert layer's tokens take 8 experts."""
