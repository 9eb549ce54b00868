"""Every kernel on every sample of its op, in every dtype and KV layout, against the op's own body in float32.

What a kernel must compute is told in its op's docstring. A sample fixes the op's sizes; weights and inputs are random.
Kernels run with fresh memory full of NaN and caches full of other sequences' entries; samples of decode steps run a
second time with padded sequences (slot -1), as captured steps have them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

import pytest
import torch

from inferplane.binding import Outcome, run_case
from inferplane.conformance.plugin import SUBJECT
from inferplane.conformance.subject import Subject
from inferplane.engine.runner.options import DTYPES
from inferplane.ops import OPS, Op, Sample
from inferplane.types import Context, Features, Kernel

RUNS = ((1, False), (2, True))
"""Seed, and whether padded. The start-up canary has seed 0: these numbers are fresh."""


@dataclass(frozen=True)
class Case:
    """One kernel on one sample in one dtype and layout (None: the op has no cache)."""

    kernel: Kernel
    sample: Sample
    dtype: str
    layout: str | None

    @property
    def id(self) -> str:
        parts = [self.kernel.op, self.kernel.name, self.sample.label, self.dtype]
        return "/".join(parts if self.layout is None else [*parts, self.layout])


def cases(subject: Subject) -> list[Case]:
    out = []
    for kernel in subject.kernels:
        for sample in OPS[kernel.op].samples() if kernel.op in OPS else ():
            for name, dtype in subject.dtypes.items():
                out += [Case(kernel, sample, name, layout) for layout in layout_names(subject, sample.op, dtype)]
    return out


def layout_names(subject: Subject, op: Op, dtype: torch.dtype) -> list[str | None]:
    """Layouts on offer to all of an op's caches; [None] when it has none."""
    offers = [[layout.name for layout in subject.layouts(r, dtype)] for r in op.kv_requests()]
    return [name for name in offers[0] if all(name in offer for offer in offers)] if offers else [None]


def pytest_generate_tests(metafunc):
    subject = metafunc.config.stash[SUBJECT]
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases(subject), ids=lambda case: case.id)
    if "kernel" in metafunc.fixturenames:
        metafunc.parametrize("kernel", subject.kernels, ids=lambda kernel: f"{kernel.op}/{kernel.name}/served")


def test_kernel(case, device, measured):
    """The kernel computes what its op means, and touches nothing else."""
    bench = device.bench(DTYPES[case.dtype], case.layout)
    worst = None
    for seed, padded in RUNS:
        outcome = run_case(case.kernel, case.sample, bench, seed=seed, padded=padded)
        if not outcome.served:
            pytest.skip(f"refused: {case.kernel.name} does not take it: {outcome.detail}")
        if worst is None or outcome.error > worst.error:
            worst = outcome
        measured(op=case.kernel.op, error=worst.error, tolerance=worst.tolerance)
        if not outcome.passed:
            pytest.fail(account(case, device, outcome, seed, padded), pytrace=False)


def test_some_sample_is_served(kernel, device, measured):
    """A kernel that refuses every sample of its op, in every dtype, would go untested."""
    measured(op=kernel.op)
    assert kernel.op in OPS, f"there is no op {kernel.op!r}; there are {', '.join(sorted(OPS))}"
    samples = OPS[kernel.op].samples()
    if not samples:
        pytest.skip(f"refused: op {kernel.op} has no samples; its kernels are judged by the model cases")
    reasons: dict[str, None] = {}
    # Another series of the device may have what this one lacks: then it is that series' run which has to show it.
    everything = Features(kernel.when.features)
    elsewhere = False
    for sample in samples:
        for dtype in DTYPES.values():
            for layout in layout_names(device, sample.op, dtype):
                offers = device.bench(dtype).layouts
                layouts = {r: next(x for x in offers(r) if x.name == layout) for r in sample.op.kv_requests()}
                ctx = Context(dtype, sample.step_kind, layouts, device.features)
                refusals = kernel.refusals(sample.op, ctx, sample.op.formats())
                if not refusals:
                    return
                reasons.update(dict.fromkeys(refusals))
                features = Features({**device.features, **everything})
                elsewhere |= not kernel.refusals(sample.op, replace(ctx, features=features), sample.op.formats())
    if elsewhere:
        pytest.skip(f"refused: {'; '.join(device.features.lacking(kernel.when.features))}")
    listed = "\n".join(f"  {reason}" for reason in reasons)
    pytest.fail(
        f"no sample serves it: {kernel.name} refuses all {len(samples)} samples of op {kernel.op}, so nothing shows "
        f"that it is right. Its reasons:\n{listed}",
        pytrace=False,
    )


def account(case: Case, subject: Subject, outcome: Outcome, seed: int, padded: bool) -> str:
    """What a kernel's author needs: the op, what it was called with, and how far off it was."""
    op = case.sample.op
    told = {
        "op": f"{op.name}: {(inspect.getdoc(type(op)) or '').partition(chr(10) * 2)[0]}",
        "kernel": f"{case.kernel.name}, rank {case.kernel.rank}",
        "device": subject.name + (f" ({subject.state.name}, {subject.state.arch})" if subject.state else ""),
        "dtype": case.dtype,
        "sample": f"{case.sample.label}, a {case.sample.step_kind} step, seed {seed}{', padded' if padded else ''}",
        "fields": ", ".join(f"{path}={_shown(value)}" for path, value in op.items()),
        "shapes": outcome.arguments,
        "error": f"{outcome.error:.3g}" + (f" in {outcome.detail}" if _located(outcome) else ""),
        "tolerance": f"{outcome.tolerance:.3g} of the largest expected value",
    }
    if not _located(outcome) and outcome.detail:
        told["wrong"] = outcome.detail
    lines = [f"{case.kernel.name} does not compute {op.name}", *(f"  {k:<10} {v}" for k, v in told.items())]
    return "\n".join([*lines, outcome.traceback]) if outcome.traceback else "\n".join(lines)


def _located(outcome: Outcome) -> bool:
    return bool(outcome.detail) and not outcome.fatal


def _shown(value) -> str:
    if isinstance(value, Op):
        return value.name
    shape = getattr(value, "shape", None)
    return f"weight {list(shape)} {value.format}" if shape is not None else repr(value)
