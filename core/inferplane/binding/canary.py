"""The start-up canary: each chosen kernel runs its smallest sample and is compared with the oracle."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from inferplane.binding.check import Bench, LayoutsFor, Outcome, run_case
from inferplane.binding.plan import Plan
from inferplane.ops import OPS, Sample
from inferplane.types import PLAIN, Kernel


@dataclass(frozen=True)
class Verdict:
    """The canary's result for a kernel; `outcome` is None if the kernel accepts no sample of its op."""

    kernel: Kernel
    sample: str
    outcome: Outcome | None

    @property
    def failed(self) -> bool:
        """True if a sample ran and its result was wrong."""
        return self.outcome is not None and not self.outcome.passed

    @property
    def reason(self) -> str:
        """One sentence for explain and the warning."""
        if self.outcome is None:
            return "not checked: it accepts none of its op's samples"
        o = self.outcome
        numbers = f"error {o.error:.3g}, tolerance {o.tolerance:.3g}"
        return f"canary failed on sample {self.sample!r}: {o.detail or 'result'}; {numbers}"


def run_canary(plan: Plan, torch_device: str, layouts: LayoutsFor, checked: Collection[int] = ()) -> list[Verdict]:
    """Check each kernel that a plan chose on the smallest sample that the kernel accepts in the plan's context.

    A kernel that reads weights of several formats is checked on a sample of each.

    Args:
        plan: its kernels are checked.
        torch_device: the opened device.
        layouts: available layouts for a cache request; those with the plan's chosen names are used.
        checked: ids of kernels that are checked already.

    Returns:
        One verdict per kernel.
    """
    chosen = {x.name for x in plan.layouts.values()}

    def same_layouts(request):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - a LayoutsFor
        return [x for x in layouts(request) if x.name in chosen or len(layouts(request)) == 1]

    settings = plan.settings
    kernels = [k for r in plan.resolvers.values() for same in r.by_op.values() for k in same]
    bench = Bench(
        settings.device,
        torch_device,
        settings.dtype,
        settings.features,
        same_layouts,
        kernels=list(dict.fromkeys(kernels)),
    )
    return [_check(kernel, formats, bench) for kernel, formats in _kernels(plan).items() if id(kernel) not in checked]


def _kernels(plan: Plan) -> dict[Kernel, set[frozenset[str]]]:
    """Each chosen kernel, and the weight formats of the ops that it was chosen for."""
    found: dict[Kernel, set[frozenset[str]]] = {}
    for _, _, op, choice in plan.distinct():
        if choice.kernel is not None:
            formats = op.formats() if choice.dequantize == "never" else frozenset({PLAIN})
            found.setdefault(choice.kernel, set()).add(formats)
    return found


def _check(kernel: Kernel, formats: Iterable[frozenset[str]], bench: Bench) -> Verdict:
    samples = OPS[kernel.op].samples()
    verdict = Verdict(kernel, "", None)
    for needed in sorted(formats, key=sorted):
        same = [s for s in samples if s.op.formats() == needed]
        verdict = _check_first(kernel, same, bench)
        if verdict.outcome is None:
            verdict = _check_first(kernel, samples, bench)
        if verdict.failed:
            break
    return verdict


def _check_first(kernel: Kernel, samples: Sequence[Sample], bench: Bench) -> Verdict:
    """The verdict on the first of these samples that the kernel accepts."""
    for sample in samples:
        outcome = run_case(kernel, sample, bench, poisoned=True)  # fresh memory of a device may hold NaN
        if outcome.passed and sample.step_kind == "decode":
            outcome = run_case(kernel, sample, bench, padded=True)
        if outcome.served:
            return Verdict(kernel, sample.label, outcome)
    return Verdict(kernel, "", None)
