"""Choosing a kernel for every site, with the reason, before any tensor exists.

The order is: a user's pin, the lock file, the highest accepted rank, the decomposition, the reference. A decomposition
whose lowest-ranked hot leaf outranks the composite kernel wins over it. Registration order never decides anything.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inferplane.binding.lock import signature
from inferplane.errors import BindError, KernelError
from inferplane.ops import OPS, Op
from inferplane.types import PLAIN, Context, Kernel, Weight

REFERENCE = "reference"


@dataclass(frozen=True)
class Rejection:
    """A kernel that was not chosen, and why."""

    kernel: str
    rank: int
    reason: str


@dataclass(eq=False)
class Choice:
    """The outcome for one signature, shared by all sites that have it.

    Args:
        op: the op's name.
        kernel: the winner; None means the op's body runs (a decomposition if it has children, else the reference).
        rank: the winner's rank, or the lowest rank among the body's hot leaves; 0 for a reference.
        why: one sentence.
        rejected: every other kernel with its reason.
        children: what the body's children are bound to; empty under a kernel.
        hot: it, or something below it, is hot.
        variant: the body taken instead of the usual one, by a pin.
        ambiguous: another accepted kernel has the same rank.
        dequantized: own quantized weights are expanded at load, because no kernel of this op takes their format.
    """

    op: str
    kernel: Kernel | None
    rank: int
    why: str
    rejected: list[Rejection]
    children: dict[str, Choice]
    hot: bool
    variant: str | None = None
    ambiguous: bool = False
    dequantized: bool = False
    own_hot: bool = False

    @property
    def label(self) -> str:
        """What runs, as explain prints it."""
        if self.kernel is not None:
            return self.kernel.name
        if self.variant is not None:
            return f"decomposition ({self.variant})"
        return "decomposition" if self.children else REFERENCE


@dataclass
class Options:
    """What the user asked of binding.

    Args:
        pins: site or op name (shell patterns allowed in sites) -> provider, "reference", "decomposition" or a variant.
        lock: "op|step_kind|signature" -> kernel name.
        demoted: kernels that failed the canary, with the reason.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    lock: Mapping[str, str] = field(default_factory=dict)
    demoted: Mapping[Kernel, str] = field(default_factory=dict)


class Resolver:
    """Resolves the sites of models in one context.

    Args:
        kernels: all kernels that the device's plugins declare.
        ctx: dtype, step kind, layouts, features.
        options: pins, lock, demotions.

    Raises:
        KernelError: a kernel names an unknown op or takes other parameters than the op's `__call__`.
    """

    def __init__(self, kernels: Sequence[Kernel], ctx: Context, options: Options) -> None:
        self.ctx, self.options = ctx, options
        self.by_op: dict[str, list[Kernel]] = defaultdict(list)
        for kernel in kernels:
            check_declaration(kernel)
            self.by_op[kernel.op].append(kernel)
        for same in self.by_op.values():
            same.sort(key=lambda k: (-k.rank, k.name))
        self.refused: dict[tuple[object, Kernel], list[str]] = {}
        self.used_pins: set[str] = set()
        self._memo: dict[object, Choice] = {}
        self._formats: dict[object, frozenset[str]] = {}
        self._native: dict[tuple[str, str], bool] = {}

    def resolve(self, op: Op, site: str = "") -> Choice:
        """The choice for `op` at `site`, and for everything below it.

        Raises:
            BindError: a pin names a provider that has no kernel here, or whose kernel is refused.
        """
        pinned = self._pins_at_or_below(site) if self.options.pins else ()
        memo_key = (op.key(), site if pinned else None)
        found = self._memo.get(memo_key)
        if found is None:
            found = self._memo[memo_key] = self._resolve(op, site)
        return found

    def _resolve(self, op: Op, site: str) -> Choice:
        children = {path: self.resolve(child, f"{site}.{path}" if site else path) for path, child in op.children()}
        rejected: list[Rejection] = []
        accepted: list[Kernel] = []
        formats = self.formats(op)
        for kernel in self.by_op[op.name]:
            reasons = kernel.refusals(op, self.ctx, formats) + self.refused.get((op.key(), kernel), [])
            if kernel in self.options.demoted:
                reasons.append(f"demoted: {self.options.demoted[kernel]}")
            if reasons:
                rejected.append(Rejection(kernel.name, kernel.rank, "; ".join(reasons)))
            else:
                accepted.append(kernel)
        hot = op.hot or any(c.hot for c in children.values())
        leaves = [c for c in children.values() if c.hot] or list(children.values())
        body_rank = min((c.rank for c in leaves), default=0)
        dequantized = any(v.format != PLAIN and not self.native(op.name, v.format) for v in _own_weights(op))
        choice = Choice(op.name, None, body_rank, "", rejected, children, hot, dequantized=dequantized, own_hot=op.hot)
        self._decide(choice, op, site, accepted, body_rank)
        for kernel in accepted:
            if kernel is not choice.kernel and all(r.kernel != kernel.name for r in rejected):
                reason = f"ranks below {choice.label}" if choice.kernel else choice.why
                rejected.append(Rejection(kernel.name, kernel.rank, reason))
        if choice.kernel is not None:
            choice.children, choice.rank = {}, choice.kernel.rank
        return choice

    def _decide(self, c: Choice, op: Op, site: str, accepted: list[Kernel], body_rank: int) -> None:
        pin = self._pin(op, site)
        if pin is not None:
            name, provider = pin
            if provider in (REFERENCE, "decomposition"):
                c.why = f"pinned to {provider} by {name!r}"
            elif provider in op.variants:
                c.variant, c.why = provider, f"pinned to {provider} by {name!r}"
            else:
                c.kernel = next((k for k in accepted if provider in (k.provider, k.name)), None)
                if c.kernel is None:
                    raise self._pin_error(op, site, name, provider, c.rejected, accepted)
                c.why = f"pinned to {provider} by {name!r}"
            return
        if self.options.lock:
            locked = self.options.lock.get(f"{op.name}|{self.ctx.step_kind}|{signature(op)}")
            c.kernel = next((k for k in accepted if k.name == locked), None)
            if c.kernel is not None:
                c.why = "chosen by the lock file"
                return
        if not accepted:
            c.why = "no kernel takes it: decomposed" if c.children else "no kernel takes it: reference"
            return
        best = accepted[0]
        if len(accepted) > 1 and accepted[1].rank == best.rank:
            c.kernel, c.ambiguous = best, True
            c.why = f"AMBIGUOUS: {accepted[1].name} has rank {best.rank} too; pin one, or change a rank"
        elif c.children and body_rank > best.rank:
            c.why = f"decomposed: its slowest hot part has rank {body_rank}, above {best.name} with {best.rank}"
        else:
            c.kernel = best
            c.why = f"rank {best.rank}" + (f" over the decomposition's {body_rank}" if c.children else "")

    # -- weight formats

    def native(self, op_name: str, format: str) -> bool:
        """Whether some kernel of this op takes weights of this format here; if not, they are expanded at load."""
        found = self._native.get((op_name, format))
        if found is None:
            found = any(
                format in k.when.formats
                and (not k.when.dtypes or self.ctx.dtype in k.when.dtypes)
                and not self.ctx.features.lacking(k.when.features)
                and k not in self.options.demoted
                for k in self.by_op[op_name]
            )
            self._native[op_name, format] = found
        return found

    def formats(self, op: Op) -> frozenset[str]:
        """Formats in which the weights of `op` and below reach their kernels."""
        if op.formats() <= {PLAIN}:
            return op.formats()
        found = self._formats.get(op.key())
        if found is None:
            own = {w.format if self.native(op.name, w.format) else PLAIN for w in _own_weights(op)}
            found = frozenset(own.union(*(self.formats(c) for _, c in op.children())))
            self._formats[op.key()] = found
        return found

    # -- pins

    def _pin(self, op: Op, site: str) -> tuple[str, str] | None:
        for name, provider in self.options.pins.items():
            if name == site or (any(c in name for c in "*?[") and fnmatch.fnmatchcase(site, name)):
                self.used_pins.add(name)
                return name, provider
        provider = self.options.pins.get(op.name)
        if provider is None:
            return None
        self.used_pins.add(op.name)
        return op.name, provider

    def _pins_at_or_below(self, site: str) -> bool:
        if not site:
            return True
        return any(
            name.startswith(site) or any(c in name for c in "*?[") for name in self.options.pins if name not in OPS
        )

    def _pin_error(
        self, op: Op, site: str, name: str, provider: str, rejected: list[Rejection], accepted: list[Kernel]
    ) -> BindError:
        refusal = next((r for r in rejected if r.kernel.split(":")[0] == provider or r.kernel == provider), None)
        there = [k.name for k in accepted] + sorted(op.variants) + [REFERENCE]
        why = f"its kernel {refusal.kernel} is refused: {refusal.reason}" if refusal else "it has no kernel for this op"
        return BindError(
            f"Op {op.name!r} at {site or 'the root'} is pinned to {provider!r} by {name!r}, but {why}.",
            there_is=", ".join(there),
            remedy="pin one of these, or drop the pin",
        )


def check_declaration(kernel: Kernel) -> None:
    """Raise KernelError when a kernel names an unknown op or takes other parameters than the op passes."""
    op = OPS.get(kernel.op)
    if op is None:
        raise KernelError(
            f"Kernel {kernel.name} is declared for an unknown op {kernel.op!r}.",
            there_is=", ".join(sorted(OPS)),
            remedy="declare it for one of these",
        )
    if isinstance(kernel.target, str):
        return  # a dotted target is imported, and checked, at link
    check_parameters(kernel)


def check_parameters(kernel: Kernel) -> None:
    """Raise KernelError when the kernel's function does not take a view and then exactly the op's parameters."""
    want = list(inspect.signature(OPS[kernel.op].__call__).parameters)[1:]
    try:
        have = list(inspect.signature(kernel.function()).parameters)[1:]
    except ValueError:
        return  # a builtin without a signature: the canary and conformance judge it
    if have != want:
        raise KernelError(
            f"Kernel {kernel.name} takes ({', '.join(have)}) after its view, but op {kernel.op!r} passes "
            f"({', '.join(want)}).",
            remedy="give the function exactly these parameters, in this order",
        )


def _own_weights(op: Op) -> list[Weight]:
    return [v for _, v in op.items() if isinstance(v, Weight)]
