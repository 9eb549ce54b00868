"""Comparing one kernel with its op's oracle on one sample, for the start-up canary and the conformance suite."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferplane.binding.case import (
    Caches,
    Untouched,
    batch_in,
    caches_in,
    describe,
    pad,
    poison_memory,
    real_rows,
    reuse_memory,
    scale_error,
    shape_error,
    views_in,
)
from inferplane.binding.case_caches import WatchedCaches, host_arguments
from inferplane.binding.case_states import WatchedStates, poison_states
from inferplane.binding.choice import Choice, Options
from inferplane.binding.link import link
from inferplane.binding.plan import Plan, PlanSettings
from inferplane.binding.resolver import Resolver
from inferplane.errors import BindError, UsageError, in_words
from inferplane.ops import Draw, Op, Sample
from inferplane.ops.oracle import oracle_arguments, to_host
from inferplane.types import (
    HOST,
    Context,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    QTensor,
    StepKind,
)

LayoutsFor = Callable[[KVRequest], Sequence[KVLayout]]


@dataclass(frozen=True)
class Outcome:
    """The result of one case.

    Args:
        served: False if the kernel refuses the sample; `detail` then has the reason.
        error: largest error, as the op compares.
        tolerance: largest accepted error.
        detail: where the error is, or what is wrong, in words.
        arguments: the kernel's arguments, in words.
        traceback: Python's, if the kernel raised.
        fatal: the kernel is wrong at any tolerance: it raised, returned something misshapen, changed an input, or the
            like.
    """

    served: bool
    error: float = 0.0
    tolerance: float = 0.0
    detail: str = ""
    arguments: str = ""
    traceback: str = ""
    fatal: bool = False

    @property
    def passed(self) -> bool:
        """Served, and within the tolerance."""
        return self.served and self.error <= self.tolerance and not self.fatal


@dataclass(frozen=True)
class Bench:
    """Where cases run.

    Args:
        device: the device's name for users, for messages.
        torch_device: where tensors go.
        dtype: activation dtype.
        features: the device's features.
        layouts: available layouts for a cache request.
        layout: name of the layout to use; None: the first one that the kernel accepts.
        kernels: what children are bound to under a kernel that inlines them (`Kernel.inlines`).
    """

    device: str
    torch_device: str
    dtype: torch.dtype
    features: Features
    layouts: LayoutsFor
    layout: str | None = None
    kernels: Sequence[Kernel] = ()


def run_case(
    kernel: Kernel | None,
    sample: Sample,
    bench: Bench,
    *,
    seed: int = 0,
    padded: bool = False,
    poisoned: bool = False,
) -> Outcome:
    """Run a kernel (None: the op's own body) on a sample and compare it with the oracle.

    It checks the results' number, shapes, dtypes and values; that nothing is NaN or infinite, with fresh memory
    poisoned; that no input changed; and, for ops with a cache, the entries and states that can be read afterwards, and
    that only the step's slots changed, or slots of a span behind them (`KVLayout.span`). All other slots of the caches
    hold stale numbers. Where a layout rounds, its error is accepted of the entries alone: the oracle attends to the
    step's entries as the kernel stored them.

    Args:
        kernel: the kernel under test.
        sample: a case of its op.
        bench: where the case runs.
        seed: of inputs and weights.
        padded: for samples of decode steps, add padded sequences (slot -1) as captured steps have them, which the
            kernel must ignore, and hide the lengths from the host unless the kernel declares `needs_host_lens`.
        poisoned: fill the slots that belong to no sequence with NaN instead of finite numbers.
    """
    prepared = _prepare_case(kernel, sample, bench)
    if isinstance(prepared, str):
        return Outcome(False, detail=prepared)
    layouts, kind, tolerance, running = prepared
    op = sample.op
    writes = any(o.writes_cache for _, o in op.sites())
    caches = Caches(layouts, bench.dtype, bench.torch_device, seed)
    draw = Draw(seed, bench.dtype, bench.torch_device, caches.build)
    weights = {id(w): draw.weight(w) for _, w in op.weights()}
    args = sample.inputs(draw)
    if poisoned:
        for cache, view in zip(caches_in(args), views_in(args)):
            caches.poison(cache, view)
        poison_states(args)

    ideal_args = oracle_arguments(args)
    expected = _run_body(sample, bench, weights, host_arguments(args, ideal_args))
    batch, given = batch_in(args), args
    padded = padded and sample.step_kind == "decode" and batch is not None and batch.kind == "decode"
    if padded:
        given = pad(args, draw, lens_known=kernel is None or any(k.needs_host_lens for k in running))
    described = describe(given)

    def wrong(detail: str, trace: str = "") -> Outcome:
        return Outcome(True, float("inf"), tolerance, detail, described, trace, fatal=True)

    try:
        packed = _pack_weights(op, kernel, weights, bench, kind, bench.torch_device)
        function = _bind_alone(op, kernel, packed, bench, kind)
        untouched = Untouched(given, packed.values())
        watched, states = WatchedCaches(given, caches), WatchedStates(given)
        with poison_memory():
            returned = function(*given)
            got = to_host(returned)
    except Exception as raised:
        return wrong(f"raised {in_words(raised)}", traceback.format_exc())
    if padded and batch is not None and expected is not None:
        got = real_rows(got, expected, args, batch)
    if misshapen := shape_error(got, expected):
        return wrong(misshapen)
    if not op.may_change_inputs and (change := untouched.describe_change()):
        return wrong(change)
    if stray := watched.describe_stray_write(writes):
        return wrong(stray)
    if stray := states.describe_stray_write(batch_in(given)):
        return wrong(stray)
    watched.lead(ideal_args)
    ideal = _run_body(sample, bench, weights, ideal_args, oracle=True)
    try:
        compared = op.compare(got, ideal) if ideal is not None else None
    except Exception as raised:
        return wrong(f"result could not be compared ({type(raised).__name__}: {raised})")
    error, detail = (compared.error, compared.detail) if compared else (0.0, "")
    if (other := states.error(batch, ideal_args)) > error:
        error, detail = other, "in the states"
    rounding = watched.rounding(bench.dtype) if writes else 0.0
    found = [
        (error, tolerance + min(tolerance, 2 * rounding), detail),  # what is read is rounded to the plan's dtype again
        (watched.error(ideal_args), tolerance + rounding, "in the cache"),
    ]
    worst = max(found, key=lambda one: one[0] / max(one[1], 1e-30))
    outcome = Outcome(True, *worst, described)
    if not outcome.passed or expected is None:
        return outcome
    fault = scale_error(got, ideal, tolerance) if op.compares_entries else ""
    fault = fault or reuse_memory(function, given, returned)
    return wrong(fault) if fault else outcome


def _prepare_case(
    kernel: Kernel | None, sample: Sample, bench: Bench
) -> tuple[dict[KVRequest, KVLayout], StepKind, float, list[Kernel]] | str:
    """The case's layouts, step kind and tolerance; a reason in words if the kernel refuses the sample."""
    op = sample.op
    layouts = _choose_layouts(kernel, op, bench)
    if isinstance(layouts, str):
        return layouts
    kind = sample.step_kind
    if kernel is not None and kernel.when.step_kinds and not op.kv_requests():
        kind = kernel.when.step_kinds[0]  # without a cache, a sample is valid for steps of every kind
    if kernel is not None:
        reasons = kernel.refusals(op, Context(bench.dtype, kind, layouts, bench.features), op.formats())
        if reasons:
            return "; ".join(reasons)
    tolerance = op.tolerance.get(bench.dtype)
    if tolerance is None:
        return f"op {op.name} states no tolerance for {bench.dtype}"
    try:
        running = _kernels_run(op, kernel, bench, kind)
    except BindError as refused:
        return refused.what
    return layouts, kind, tolerance + max((k.extra_error_of(op) for k in running), default=0.0), running


def _run_body(
    sample: Sample, bench: Bench, weights: dict[int, Any], args: tuple[Any, ...], *, oracle: bool = False
) -> Any:
    """Results of the op's body on the host: in the plan's dtype, which has the required shapes and dtypes, or in
    float32."""
    op, kind = sample.op, sample.step_kind
    packed = _pack_weights(op, None, weights, bench, kind, HOST, oracle=oracle)
    return _bind_alone(op, None, packed, bench, kind, oracle=oracle)(*args)


def bind_case(
    kernel: Kernel, sample: Sample, bench: Bench, *, seed: int = 0
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A kernel bound to a sample's op with random weights, and arguments for it, as `run_case` uses them.

    Args:
        kernel: accepts the sample.
        sample: a case of its op.
        bench: where the case runs.
        seed: of inputs and weights.
    """
    layouts = _choose_layouts(kernel, sample.op, bench)
    if isinstance(layouts, str):
        raise UsageError(f"{kernel.name} on {sample.label!r}: {layouts}.")
    caches = Caches(layouts, bench.dtype, bench.torch_device, seed)
    draw = Draw(seed, bench.dtype, bench.torch_device, caches.build)
    weights = {id(w): draw.weight(w) for _, w in sample.op.weights()}
    packed = _pack_weights(sample.op, kernel, weights, bench, sample.step_kind, bench.torch_device)
    return _bind_alone(sample.op, kernel, packed, bench, sample.step_kind), sample.inputs(draw)


def _choose_layouts(kernel: Kernel | None, op: Op, bench: Bench) -> dict[KVRequest, KVLayout] | str:
    chosen = {}
    for request in op.kv_requests():
        available = [x for x in bench.layouts(request) if bench.layout in (None, x.name)]
        if kernel is not None and kernel.when.kv_layouts:
            available = [x for x in available if x.name in kernel.when.kv_layouts]
        if not available:
            return f"no available KV layout for {request.kind} that the kernel accepts"
        chosen[request] = available[0]
    return chosen


def _pack_weights(
    op: Op,
    kernel: Kernel | None,
    weights: dict[int, Any],
    bench: Bench,
    kind: StepKind,
    device: str,
    *,
    oracle: bool = False,
) -> dict[tuple[int, str], Any]:
    """Canonical weights in the packings that one kernel (None: bodies on all levels) requests."""

    def value_of(i: int) -> Any:
        value = weights[i]
        if oracle:
            value = value.dequantize() if isinstance(value, QTensor) else value.float()
        return value if device == HOST else value.to(device)

    return _force_plan(op, kernel, bench, kind).pack(value_of)


def _bind_alone(
    op: Op,
    kernel: Kernel | None,
    packed: dict[tuple[int, str], Any],
    bench: Bench,
    kind: StepKind,
    *,
    oracle: bool = False,
) -> Callable[..., Any]:
    """`op` bound to one kernel (None: to bodies on all levels)."""
    return link(_force_plan(op, kernel, bench, kind, torch.float32 if oracle else None), packed)[kind]


def _force_plan(op: Op, kernel: Kernel | None, bench: Bench, kind: StepKind, dtype: torch.dtype | None = None) -> Plan:
    settings = PlanSettings(bench.device, dtype or bench.dtype, features=bench.features, max_repacked_fraction=None)
    chosen = _choose_layouts(kernel, op, bench)
    layouts = {} if isinstance(chosen, str) else chosen
    ctx = Context(settings.dtype, kind, layouts, bench.features)  # a kernel's `prepare` may look at the layouts
    if kernel is None or not kernel.inlines:
        return Plan(op, settings, layouts, {kind: _ForcedResolver(kernel, ctx)})
    others = [k for k in bench.kernels if k.op != op.name]
    return Plan(op, settings, layouts, {kind: Resolver([kernel, *others], ctx, Options({op.name: kernel.name}))})


def _kernels_run(op: Op, kernel: Kernel | None, bench: Bench, kind: StepKind) -> list[Kernel]:
    """The kernel under test and those that it inlines.

    Raises:
        BindError: the children are bound to kernels that it cannot run.
    """
    if kernel is None or not kernel.inlines:
        return [] if kernel is None else [kernel]
    return [c.kernel for _, _, c in _force_plan(op, kernel, bench, kind).sites(kind) if c.kernel is not None]


class _ForcedResolver(Resolver):
    """Chooses one kernel at the root, or bodies on all levels; weights keep their format."""

    def __init__(self, kernel: Kernel | None, ctx: Context) -> None:
        super().__init__([], ctx, Options())
        self.kernel = kernel

    def resolve(self, op: Op, site: str = "") -> Choice:
        if site == "" and self.kernel is not None:
            return Choice(op.name, self.kernel, self.kernel.rank, "under test", [], {}, op.hot)
        children = {p: self.resolve(c, f"{site}.{p}" if site else p) for p, c in op.children()}
        return Choice(op.name, None, 0, "oracle", [], children, op.hot)

    def reads_format(self, op: Op, format: str) -> bool:
        return True
