"""Holding one kernel against its op's oracle on one sample. The canary at start-up and the conformance suite share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferplane.binding.link import link
from inferplane.binding.plan import Plan, Settings
from inferplane.binding.resolver import Choice, Options, Resolver
from inferplane.ops import Draw, Op, Sample
from inferplane.ops.op import as_tuple
from inferplane.ops.oracle import OracleKV, oracle_arguments, to_host
from inferplane.types import (
    HOST,
    Batch,
    Context,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    LayerKV,
    QTensor,
    StepKind,
)

OfferLayouts = Callable[[KVRequest], Sequence[KVLayout]]


@dataclass(frozen=True)
class Outcome:
    """What became of one case.

    Args:
        served: False when the kernel refuses the sample; `detail` then says why.
        error: worst error, as the op compares.
        tolerance: largest accepted error.
        detail: where it went wrong, in words.
    """

    served: bool
    error: float = 0.0
    tolerance: float = 0.0
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Served, and within the tolerance."""
        return self.served and self.error <= self.tolerance and not self.detail.startswith("!")


@dataclass(frozen=True)
class Bench:
    """Where cases run.

    Args:
        device: the user's word, for messages.
        torch_device: where tensors go.
        dtype: activations' dtype.
        features: what the device can do.
        layouts: layouts on offer for a cache request.
        layout: the layout to take, by name; None takes each kernel's first accepted one.
    """

    device: str
    torch_device: str
    dtype: torch.dtype
    features: Features
    layouts: OfferLayouts
    layout: str | None = None


def run_case(kernel: Kernel | None, sample: Sample, bench: Bench, *, seed: int = 0) -> Outcome:
    """Run a kernel (None: the op's own body) on a sample and compare it with the oracle.

    Checked are: the results' number, shapes, dtypes and values; that nothing is NaN or infinite; that no input was
    changed; and, for ops that write the cache, what can be read from it afterwards.
    """
    op = sample.op
    chosen = _choose_layouts(kernel, op, bench)
    if isinstance(chosen, str):
        return Outcome(False, detail=chosen)
    ctx = Context(bench.dtype, sample.step_kind, chosen, bench.features)
    if kernel is not None:
        reasons = kernel.refusals(op, ctx, op.formats())
        if reasons:
            return Outcome(False, detail="; ".join(reasons))
    tolerance = op.tolerance.get(bench.dtype)
    if tolerance is None:
        return Outcome(False, detail=f"op {op.name} states no tolerance for {bench.dtype}")
    if any(name.endswith("kv_write") for name in (o.name for _, o in op.sites())):
        tolerance += max((x.tolerance for x in chosen.values()), default=0.0)

    def build_kv(request: KVRequest, blocks: int) -> LayerKV:
        return chosen[request].build(request, blocks, bench.dtype, torch.device(bench.torch_device))

    draw = Draw(seed, bench.dtype, bench.torch_device, build_kv)
    weights = {id(w): draw.weight(w) for _, w in op.weights()}
    args = sample.inputs(draw)
    ideal_args = oracle_arguments(args)
    usual = _bound(op, None, weights, bench, sample.step_kind, HOST)(*_host_arguments(args, ideal_args, bench.dtype))
    ideal = _bound(op, None, weights, bench, sample.step_kind, HOST, oracle=True)(*ideal_args)
    before = [to_host(a) for a in args if isinstance(a, torch.Tensor)]
    try:
        function = _bound(op, kernel, weights, bench, sample.step_kind, bench.torch_device)
        got = to_host(function(*args))
    except Exception as error:
        return Outcome(True, float("inf"), tolerance, f"! raised {type(error).__name__}: {error}")
    shape_error = _shape_error(got, usual)
    if shape_error:
        return Outcome(True, float("inf"), tolerance, f"! {shape_error}")
    outcome = op.compare(got, ideal) if ideal is not None else None
    error, detail = (outcome.error, outcome.detail) if outcome else (0.0, "")
    for changed, original in zip((to_host(a) for a in args if isinstance(a, torch.Tensor)), before):
        if op.name != "all_reduce" and not torch.equal(changed, original):
            return Outcome(True, float("inf"), tolerance, "! an input was changed")
    written = _cache_error(args, ideal_args)
    if written > error:
        error, detail = written, "in the cache"
    return Outcome(True, error, tolerance, detail)


def _choose_layouts(kernel: Kernel | None, op: Op, bench: Bench) -> dict[KVRequest, KVLayout] | str:
    chosen = {}
    for request in op.kv_requests():
        offers = [x for x in bench.layouts(request) if bench.layout in (None, x.name)]
        if kernel is not None and kernel.when.kv_layouts:
            offers = [x for x in offers if x.name in kernel.when.kv_layouts]
        if not offers:
            return f"no KV layout on offer for {request.kind} that the kernel takes"
        chosen[request] = offers[0]
    return chosen


def _bound(
    op: Op,
    kernel: Kernel | None,
    weights: dict[int, Any],
    bench: Bench,
    kind: StepKind,
    device: str,
    *,
    oracle: bool = False,
) -> Callable[..., Any]:
    """`op` bound to one kernel, or to bodies all the way down, over the given canonical weights."""
    dtype = torch.float32 if oracle else bench.dtype
    settings = Settings(bench.device, dtype, features=bench.features, copies=None)
    ctx = Context(dtype, kind, {}, bench.features)
    plan = Plan(op, settings, {}, {kind: _Forced(kernel, ctx)})
    packed = {}
    for i, names in plan.packings.items():
        full = weights[i]
        if oracle:
            full = full.dequantize() if isinstance(full, QTensor) else full.float()
        if device != HOST:
            full = full.to(device)
        for name, packing in names.items():
            packed[i, name] = packing.fn(full)
    return link(plan, packed)[kind]


class _Forced(Resolver):
    """Takes one kernel at the root and bodies everywhere below; weights keep their format."""

    def __init__(self, kernel: Kernel | None, ctx: Context) -> None:
        super().__init__([], ctx, Options())
        self.kernel = kernel

    def resolve(self, op: Op, site: str = "") -> Choice:
        if site == "" and self.kernel is not None:
            return Choice(op.name, self.kernel, self.kernel.rank, "under test", [], {}, op.hot)
        children = {p: self.resolve(c, f"{site}.{p}" if site else p) for p, c in op.children()}
        return Choice(op.name, None, 0, "oracle", [], children, op.hot)

    def native(self, op_name: str, format: str) -> bool:
        return True


def _host_arguments(args: tuple[Any, ...], ideal: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments for the body in the plan's dtype on the host: shows which shapes and dtypes a kernel must return."""
    out = []
    for arg, other in zip(args, ideal):
        if isinstance(arg, torch.Tensor):
            out.append(to_host(arg))
        elif isinstance(other, OracleKV):
            twin = OracleKV(other.request, other.block_tokens, other.entries[0].shape[0])
            twin.entries = [e.clone() for e in other.entries]
            out.append(twin)
        else:
            out.append(other)
    return tuple(out)


def _shape_error(got: Any, usual: Any) -> str:
    if usual is None:
        return "" if got is None else f"returned {type(got).__name__} instead of nothing"
    gots, usuals = as_tuple(got), as_tuple(usual)
    if len(gots) != len(usuals):
        return f"{len(gots)} results instead of {len(usuals)}"
    for i, (g, u) in enumerate(zip(gots, usuals)):
        if not isinstance(g, torch.Tensor):
            return f"result {i} is {type(g).__name__}, not a tensor"
        if tuple(g.shape) != tuple(u.shape):
            return f"result {i} has shape {list(g.shape)} instead of {list(u.shape)}"
        if g.dtype != u.dtype and not (_is_index(g) and _is_index(u)):
            return f"result {i} has dtype {g.dtype} instead of {u.dtype}"
        if g.is_floating_point() and not torch.isfinite(g.float()).all():
            return f"result {i} holds NaN or Inf"
    return ""


def _is_index(t: torch.Tensor) -> bool:
    return t.dtype in (torch.int32, torch.int64)


def _cache_error(args: tuple[Any, ...], ideal: tuple[Any, ...]) -> float:
    """Worst error over everything that can be read from the caches afterwards."""
    worst = 0.0
    batch = next((a for a in args if isinstance(a, Batch)), None)
    for kv, twin in zip(args, ideal):
        if not isinstance(kv, LayerKV) or batch is None:
            continue
        host = next(a for a in ideal if isinstance(a, Batch))
        for i, n in enumerate(host.lens().seq_lens):
            if not n:
                continue
            held = to_host(kv.read(batch.block_tables[i], n), widen=True)
            want = twin.read(host.block_tables[i], n)
            for h, w in zip(held, want):
                if h.shape != w.shape or not torch.isfinite(h).all():
                    return float("inf")
                worst = max(worst, ((h - w).abs().max() / w.abs().max().clamp_min(1e-30)).item())
    return worst
