"""Compares each kernel with its op's body in float32, on every sample of the op, in every dtype and KV layout.

The docstring of an op defines what its kernels compute. A sample fixes the op's sizes; weights and inputs are random.
Fresh memory is filled with NaN, and caches with entries of other sequences. Samples of decode steps also run with
padded sequences (slot -1), as in captured steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from inferplane.binding import Outcome, run_case
from inferplane.conformance.plugin import SUBJECT
from inferplane.conformance.subject import Subject
from inferplane.engine.runner.options import DTYPES
from inferplane.ops import OPS, Op, Sample
from inferplane.types import Context, Features, Kernel, KVLayout

RUNS = ((1, False), (2, True))
"""Seed, and whether sequences are padded. The start-up canary uses seed 0, so these numbers are new."""


@dataclass(frozen=True)
class KernelCase:
    """A kernel with a sample, a dtype and a layout (None if the op has no cache)."""

    kernel: Kernel
    sample: Sample
    dtype: str
    layout: str | None

    @property
    def id(self) -> str:
        parts = [self.kernel.op, self.kernel.name, self.sample.label, self.dtype]
        return "/".join(parts if self.layout is None else [*parts, self.layout])


def cases(subject: Subject) -> list[KernelCase]:
    out = []
    for kernel in subject.kernels:
        for sample in OPS[kernel.op].samples() if kernel.op in OPS else ():
            for name, dtype in subject.dtypes.items():
                out += [KernelCase(kernel, sample, name, layout) for layout in layout_names(subject, sample.op, dtype)]
    return out


def layout_names(subject: Subject, op: Op, dtype: torch.dtype) -> list[str | None]:
    """Layouts that are available for all caches of an op. None is for an op without caches, and for one whose caches
    have layouts of different names: each is then in the first one that the kernel accepts."""
    available = [[layout.name for layout in subject.layouts(r, dtype)] for r in op.kv_requests()]
    if not available:
        return [None]
    shared: list[str | None] = [name for name in available[0] if all(name in names for names in available)]
    return shared if len({names[0] for names in available}) == 1 else [*shared, None]


def find_accepted_layout(kernel: Kernel, available: Sequence[KVLayout], name: str | None) -> KVLayout:
    """The layout of a cache by one of `layout_names`."""
    named = [layout for layout in available if name in (None, layout.name)]
    return next((layout for layout in named if layout.name in kernel.when.kv_layouts), named[0])


def pytest_generate_tests(metafunc):
    subject = metafunc.config.stash[SUBJECT]
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases(subject), ids=lambda case: case.id)
    if "kernel" in metafunc.fixturenames:
        metafunc.parametrize("kernel", subject.kernels, ids=lambda kernel: f"{kernel.op}/{kernel.name}/served")


def test_kernel(case, device, measured):
    """The kernel computes its op and changes nothing else."""
    bench = device.bench(DTYPES[case.dtype], case.layout)
    worst = None
    for seed, padded in RUNS:
        outcome = run_case(case.kernel, case.sample, bench, seed=seed, padded=padded)
        if not outcome.served:
            measured(refused=True)
            pytest.skip(f"refused: {case.kernel.name} does not accept it: {outcome.detail}")
        if worst is None or outcome.error > worst.error:
            worst = outcome
        measured(op=case.kernel.op, error=worst.error, tolerance=worst.tolerance)
        if not outcome.passed:
            pytest.fail(failure_report(case, device, outcome, seed, padded), pytrace=False)


def test_some_sample_is_served(kernel, device, measured):
    """A kernel that refuses every sample of its op in every dtype would not be tested."""
    measured(op=kernel.op)
    assert kernel.op in OPS, f"there is no op {kernel.op!r}; there are {', '.join(sorted(OPS))}"
    samples = OPS[kernel.op].samples()
    if not samples:
        measured(refused=True)
        pytest.skip(f"refused: op {kernel.op} has no samples; its kernels are judged by the model cases")
    reasons: dict[str, None] = {}
    # If only features of another series of the device are missing, the kernel is tested on that series.
    with_features = Features({**device.features, **Features(kernel.when.features)})
    fits_another_series = False
    for sample in samples:
        for dtype in DTYPES.values():
            for layout in layout_names(device, sample.op, dtype):
                available = device.bench(dtype).layouts
                layouts = {r: find_accepted_layout(kernel, available(r), layout) for r in sample.op.kv_requests()}
                ctx = Context(dtype, sample.step_kind, layouts, device.features)
                refusals = kernel.refusals(sample.op, ctx, sample.op.formats())
                if not refusals:
                    return
                reasons.update(dict.fromkeys(refusals))
                other = replace(ctx, features=with_features)
                fits_another_series |= not kernel.refusals(sample.op, other, sample.op.formats())
    if fits_another_series:
        measured(refused=True)
        pytest.skip(f"refused: {'; '.join(device.features.lacking(kernel.when.features))}")
    listed = "\n".join(f"  {reason}" for reason in reasons)
    pytest.fail(
        f"{kernel.name} refuses all {len(samples)} samples of op {kernel.op}, so it cannot be tested. "
        f"Its reasons:\n{listed}",
        pytrace=False,
    )


def failure_report(case: KernelCase, subject: Subject, outcome: Outcome, seed: int, padded: bool) -> str:
    """A failure in words for the kernel's author: the op, the arguments, the error."""
    op = case.sample.op
    facts = {
        "op": f"{op.name}: {(inspect.getdoc(type(op)) or '').partition(chr(10) * 2)[0]}",
        "kernel": f"{case.kernel.name}, rank {case.kernel.rank}",
        "device": subject.name + (f" ({subject.state.name}, {subject.state.arch})" if subject.state else ""),
        "dtype": case.dtype,
        "sample": f"{case.sample.label}, a {case.sample.step_kind} step, seed {seed}{', padded' if padded else ''}",
        "fields": ", ".join(f"{path}={_in_words(value)}" for path, value in op.items()),
        "shapes": outcome.arguments,
        "error": f"{outcome.error:.3g}" + (f" in {outcome.detail}" if _has_location(outcome) else ""),
        "tolerance": f"{outcome.tolerance:.3g} of the largest expected value",
    }
    if not _has_location(outcome) and outcome.detail:
        facts["wrong"] = outcome.detail
    lines = [f"{case.kernel.name} does not compute {op.name}", *(f"  {k:<10} {v}" for k, v in facts.items())]
    return "\n".join([*lines, outcome.traceback]) if outcome.traceback else "\n".join(lines)


def _has_location(outcome: Outcome) -> bool:
    return bool(outcome.detail) and not outcome.fatal


def _in_words(value) -> str:
    if isinstance(value, Op):
        return value.name
    shape = getattr(value, "shape", None)
    return f"weight {list(shape)} {value.format}" if shape is not None else repr(value)
