"""A plan: what every site of one model is bound to on one backend, and the packings of its weights."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from inferplane.binding.choice import Choice, Dequantize, Options, reads_index_keys_alone
from inferplane.binding.resolver import Resolver
from inferplane.errors import BindError, KernelError, first_of
from inferplane.ops import OPS, Op
from inferplane.ops.formats import count_bytes
from inferplane.renamed import old_names
from inferplane.types import (
    CANONICAL,
    PLAIN,
    STEP_KINDS,
    Context,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    Layouts,
    Packing,
    StepKind,
    Weight,
)

MAX_REPACKED_FRACTION = 0.05
"""Largest fraction of the weights' bytes that may be kept in a second packing."""


@old_names({"copies": "max_repacked_fraction"})
@dataclass(frozen=True)
class PlanSettings:
    """What a plan is made for.

    Args:
        device: the backend's name for users.
        dtype: activation dtype.
        arch: name of the found or assumed architecture; core never parses it.
        features: the device's features.
        deterministic: bind only batch-invariant kernels.
        max_repacked_fraction: largest fraction of weight bytes that may be kept in a second packing; None: any.
        assumed: the device is not open, so its features are assumed.
    """

    device: str
    dtype: torch.dtype
    arch: str = ""
    features: Features = field(default_factory=Features)
    deterministic: bool = False
    max_repacked_fraction: float | None = MAX_REPACKED_FRACTION
    assumed: bool = False


class Plan:
    """Every decision for one model on one backend: a tree of choices per step kind, and each weight's packings.

    Attributes: `model`, `settings`, `layouts` (cache request -> layout), `choices` (step kind -> root choice),
    `packings` (id of a weight -> label -> packing), `users` (id of a weight -> packing label -> sites), `weights`,
    `dequantized` (op name and format -> ids of the quantized weights that are dequantized at load for this op).
    """

    def __init__(
        self, model: Op, settings: PlanSettings, layouts: Layouts, resolvers: Mapping[StepKind, Resolver]
    ) -> None:
        self.model, self.settings, self.layouts = model, settings, layouts
        self.resolvers = resolvers
        self.choices: dict[StepKind, Choice] = {kind: r.resolve(model) for kind, r in resolvers.items()}
        self.weights: dict[int, Weight] = {id(w): w for _, w in model.weights()}
        self.packings: dict[int, dict[str, Packing]] = defaultdict(dict)
        self.users: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.packers: dict[int, set[tuple[StepKind, Any, Kernel]]] = defaultdict(set)
        self.dequantized: dict[tuple[str, str], set[int]] = defaultdict(set)
        for kind, choice in self.choices.items():
            self._collect(model, choice, "", kind)

    # -- packings

    def _collect(self, op: Op, choice: Choice, site: str, kind: StepKind) -> None:
        if choice.kernel is not None and not choice.binds_children:
            self._collect_view(op, choice, choice.kernel, "", site, kind, op)
            return
        for path, value in op.items():
            below = f"{site}.{path}" if site else path
            if isinstance(value, Weight):
                self._use(op, value, self.packing(op, value, CANONICAL, kind, "unserved"), below)
            elif isinstance(value, Op):
                self._collect(value, choice.children[path], below, kind)

    def _collect_view(
        self, op: Op, choice: Choice, kernel: Kernel, prefix: str, site: str, kind: StepKind, root: Op
    ) -> None:
        for path, value in op.items():
            if isinstance(value, Weight):
                packing = kernel.packs.get(prefix + path, CANONICAL)
                stored = self.packing(op, value, packing, kind, choice.dequantize, below=op is not root)
                self._use(op, value, stored, f"{site} {kernel.name}")
                if packing.name != CANONICAL.name:
                    self.packers[id(value)].add((kind, root.key(), kernel))
            elif isinstance(value, Op):
                self._collect_view(value, choice, kernel, f"{prefix}{path}.", site, kind, root)

    def packing(
        self, op: Op, weight: Weight, packing: Packing, kind: StepKind, dequantize: Dequantize, *, below: bool = False
    ) -> Packing:
        """The packing that is stored: dequantized first if the plan dequantizes the weight at load.

        Args:
            op: the op that has the weight as a field.
            weight: one of the model's weights.
            packing: the packing that the kernel requests.
            kind: step kind.
            dequantize: `Choice.dequantize` of the choice that reads the weight; "unserved" for bodies.
            below: `op` is below the op that the choice is for.
        """
        if not self.resolvers[kind].dequantizes(op, weight, dequantize, below=below):
            return packing
        return packing.dequantize_first(weight.dtype or self.settings.dtype)

    def _use(self, op: Op, weight: Weight, packing: Packing, user: str) -> None:
        stored = self.packings[id(weight)].setdefault(packing.label, packing)
        self.users[id(weight)][packing.label].add(user)
        if stored != packing:
            raise KernelError(
                f"Packing {packing.label!r} of {weight.parts[:1] or 'a constant'} is requested as stored and of "
                f"dequantized values, by {', '.join(sorted(self.users[id(weight)][packing.label]))}.",
                remedy="call one of the packings by another name",
            )
        if packing.dequantized:
            self.dequantized[op.name, weight.format].add(id(weight))

    def nbytes(self, weight: Weight, packing: str) -> int:
        """Bytes of one weight in one packing: entries, scales and minimums; padding where the packing counts it."""
        used = self.packings.get(id(weight), {}).get(packing, CANONICAL)
        if used.dequantized or weight.format == PLAIN:
            return replace(weight, format=PLAIN).nbytes(self.settings.dtype)
        if used.count_bytes is not None:
            return used.count_bytes(weight)
        return count_bytes(weight.shape, weight.format, dense=used.dense)

    def pack(self, value_of: Callable[[int], Any]) -> dict[tuple[int, str], Any]:
        """Every weight in every packing, by `(id of the weight, packing label)`, as `link` takes them.

        Args:
            value_of: id of a weight -> its canonical value.
        """
        packed = {}
        for i, names in self.packings.items():
            value = value_of(i)
            packed.update({(i, name): packing.fn(value) for name, packing in names.items()})
        return packed

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in all their packings."""
        return sum(self.nbytes(self.weights[i], name) for i, names in self.packings.items() for name in names)

    def count_copied_bytes(self) -> dict[int, int]:
        """Bytes of the second and further packings, by id of the weight."""
        out = {}
        for i, names in self.packings.items():
            if len(names) > 1:
                out[i] = sum(sorted(self.nbytes(self.weights[i], name) for name in names)[:-1])
        return out

    # -- walking

    def sites(self, kind: StepKind) -> Iterator[tuple[str, Op, Choice]]:
        """`(site, op, choice)` of every site that is bound in steps of `kind`, parents before children."""
        left: list[tuple[str, Op, Choice]] = [("", self.model, self.choices[kind])]
        while left:
            site, op, choice = left.pop()
            yield site, op, choice
            if choice.binds_children:
                below = f"{site}." if site else ""
                left += reversed([(below + path, child, choice.children[path]) for path, child in op.children()])

    def distinct(self) -> Iterator[tuple[StepKind, str, Op, Choice]]:
        """One `(step kind, first site, op, choice)` per distinct choice."""
        for kind in self.choices:
            seen: set[int] = set()
            for site, op, choice in self.sites(kind):
                if id(choice) not in seen:
                    seen.add(id(choice))
                    yield kind, site, op, choice

    def unread_caches(self) -> list[tuple[StepKind, str, Op, Choice]]:
        """`(step kind, site, op, choice)` of hot ops that run on torch because of the KV cache's dtype."""
        return [entry for entry in self.distinct() if entry[3].kv_dtype_unread]

    def faster_dtypes(self) -> dict[str, list[str]]:
        """By the dtype in which kernels would run them: hot ops that torch's operators run in the plan's dtype."""
        found: dict[str, set[str]] = defaultdict(set)
        for _, _, _, choice in self.distinct():
            if choice.faster_dtype:
                found[choice.faster_dtype].add(choice.op)
        return {dtype: sorted(ops) for dtype, ops in found.items()}

    @property
    def expanded_bytes(self) -> int:
        """Bytes, in the plan's dtype, of the quantized weights that are dequantized at load."""
        expanded = set().union(*self.dequantized.values())
        return sum(
            self.nbytes(self.weights[i], name)
            for i in expanded
            for name, packing in self.packings[i].items()
            if packing.dequantized
        )

    def hot_references(self) -> list[tuple[str, str, str]]:
        """`(step kind, site, op)` of hot ops without a kernel."""
        out: list[tuple[str, str, str]] = []
        for kind, site, op, choice in self.distinct():
            if choice.own_hot and choice.kernel is None:
                out.append((kind, site, op.name))
        return out


def bind(
    model: Op,
    kernels: Sequence[Kernel],
    settings: PlanSettings,
    kv_layouts: Callable[[KVRequest], Sequence[KVLayout]],
    *,
    options: Options | None = None,
    step_kinds: Sequence[StepKind] = STEP_KINDS,
    strict: bool = False,
) -> Plan:
    """Choose a KV layout and a kernel for every site. This needs no tensor, not even on meta.

    Args:
        model: the tree of ops.
        kernels: all kernels that the device's plugins declare.
        settings: device, dtype, features, options.
        kv_layouts: available layouts for a cache request, at least one.
        options: pins, lock, demotions.
        step_kinds: the columns of the plan.
        strict: raise if a hot op is left on its reference.

    Raises:
        BindError: a pin cannot be met or matches no site; no layouts share a block size; `strict` or
            `settings.deterministic` cannot be met.
        KernelError: a kernel is declared wrongly.
    """
    options = options or Options()
    refused: dict[tuple[StepKind, Any, Kernel], list[str]] = {}
    while True:
        plan = _best_layouts(model, kernels, settings, kv_layouts, options, step_kinds, refused)
        banned = _over_budget(plan)
        if banned is None:
            break
        keys, reason = banned
        refused.update({key: [reason] for key in keys})
    matched = set().union(*(r.used_pins for r in plan.resolvers.values()))
    if unused := sorted(set(options.pins) - matched):
        raise _report_unused_pin(model, unused)
    if hidden := sorted(matched - {c.pin for _, _, _, c in plan.distinct()}):
        raise _report_hidden_pin(plan, hidden[0])
    if settings.deterministic and (left := plan.hot_references()):
        # A body is plain torch, whose matrix products may sum in another order if the batch size changes.
        raise BindError(
            f"deterministic=True, but device {settings.device!r} has no batch-invariant kernel for "
            f"{', '.join(sorted({op for _, _, op in left}))}.",
            remedy="drop deterministic, or use a device whose kernels are batch-invariant "
            "(see `inferplane explain FOLDER --device D`)",
        )
    if strict and (left := plan.hot_references()):
        listed = first_of([f"{op} at {site or 'the root'} ({kind})" for kind, site, op in left])
        raise BindError(
            f"strict=True, but {len(left)} hot op(s) of device {settings.device!r} have no kernel: {listed}.",
            remedy="drop strict, or see the reasons in `inferplane explain FOLDER --device D`",
        )
    if strict and (slow := plan.unread_caches()):
        listed = first_of(
            [f"{op.name} at {site} ({kind}): {choice.kv_dtype_unread}" for kind, site, op, choice in slow]
        )
        remedies = {True: "pass index_key_dtype='none'", False: "leave kv_cache_dtype out"}
        ways = sorted({remedies[reads_index_keys_alone(op)] for _, _, op, _ in slow})
        raise BindError(
            f"strict=True, but {len(slow)} hot op(s) of device {settings.device!r} run on torch because of the KV "
            f"cache's dtype: {listed}.",
            remedy=f"{' and '.join(ways)}, or drop strict",
        )
    return plan


def _best_layouts(
    model: Op,
    kernels: Sequence[Kernel],
    settings: PlanSettings,
    kv_layouts: Callable[[KVRequest], Sequence[KVLayout]],
    options: Options,
    step_kinds: Sequence[StepKind],
    refused: Mapping[tuple[StepKind, Any, Kernel], list[str]],
) -> Plan:
    """The plan of the layouts whose kernels have the highest sum of ranks; the first one among equals. Only kernels
    that access a layout's memory count.
    """
    requests = model.kv_requests()
    available = [list(kv_layouts(r)) for r in requests]
    best: tuple[int, Plan] | None = None
    pin_error: BindError | None = None
    for combination in itertools.product(*available):
        if len({layout.block_tokens for layout in combination}) > 1:
            continue
        layouts = dict(zip(requests, combination))
        resolvers: dict[StepKind, Resolver] = {}
        for kind in step_kinds:
            ctx = Context(settings.dtype, kind, layouts, settings.features, settings.deterministic)
            resolvers[kind] = Resolver(kernels, ctx, options)
            resolvers[kind].refused = {(key, k): why for (s, key, k), why in refused.items() if s == kind}
        try:
            plan = Plan(model, settings, layouts, resolvers)
        except BindError as error:  # another layout may satisfy the pin
            pin_error = pin_error or error
            continue
        score = sum(_layout_score(model, c) for c in plan.choices.values())
        if best is None or score > best[0]:
            best = score, plan
    if best is None and pin_error is not None:
        raise pin_error
    if best is None:
        sizes = {f"{r.kind}, window {r.window}": [x.name for x in each] for r, each in zip(requests, available)}
        raise BindError(
            f"Device {settings.device!r} has no KV layouts with one block size for all layers of this model.",
            there_is=str(sizes),
            remedy="use a backend with KV layouts that share a block size",
        )
    return best[1]


def _layout_score(op: Op, choice: Choice) -> int:
    """Sum of the ranks of kernels that access the cache's memory, each counted once per op with a cache that it
    replaces."""
    if choice.kernel is None or choice.binds_children:
        return sum(_layout_score(child, choice.children[path]) for path, child in op.children())
    if not choice.kernel.when.kv_layouts:
        return 0
    return choice.rank * sum(isinstance(v, KVRequest) for _, o in op.sites() for _, v in o.items())


def _over_budget(plan: Plan) -> tuple[list[tuple[StepKind, Any, Kernel]], str] | None:
    """The kernel to refuse if second copies of weights exceed the limit, in every step kind that has it, and the
    reason; None if they fit.
    """
    budget = plan.settings.max_repacked_fraction
    if budget is None:
        return None
    copied = plan.count_copied_bytes()
    once = plan.weight_bytes - sum(copied.values())
    if sum(copied.values()) <= budget * once:
        return None
    candidates = [i for i in copied if plan.packers[i]]
    if not candidates:
        return None
    worst = max(candidates, key=lambda i: copied[i])
    _, lowest, kernel = min(plan.packers[worst], key=lambda u: (u[2].rank, u[2].name, u[0]))
    keys = [u for u in plan.packers[worst] if u[1] == lowest and u[2] is kernel]
    weight = plan.weights[worst]
    name = weight.parts[0] if weight.parts else "a constant"
    return keys, (
        f"would keep a second copy of {name} ({copied[worst]} bytes in packings "
        f"{', '.join(sorted(plan.packings[worst]))}); all copies may be {budget:.0%} of {once} weight bytes"
    )


def _report_hidden_pin(plan: Plan, name: str) -> BindError:
    larger = [
        f"{site or 'the root'} ({choice.kernel})"
        for kind in plan.choices
        for site, op, choice in plan.sites(kind)
        if not choice.binds_children and any(o.name == name for path, o in op.sites() if path)
    ]
    return BindError(
        f"Op {name!r} is pinned, but everywhere in this model a larger kernel replaces it: {', '.join(larger[:3])}.",
        remedy=f"pin these to 'decomposition' too, or pin {name!r} by its site",
    )


def _report_unused_pin(model: Op, unused: list[str]) -> BindError:
    import difflib

    sites = [site for site, _ in model.sites() if site]
    close = [c for name in unused for c in difflib.get_close_matches(name, [*sites, *OPS], 3)]
    return BindError(
        f"No site or op of this model is called {', '.join(map(repr, unused))}.",
        there_is=f"near it: {', '.join(close)}"
        if close
        else "ops " + ", ".join(sorted({o.name for _, o in model.sites()})),
        remedy="pin an op by its name, or a site as explain prints it (patterns such as 'layers.*.mlp' work)",
    )
