"""Chooses a kernel for every site, with the reason, before any tensor exists.

The order is: a user's pin, the lock file, the highest accepted rank, the decomposition, the reference. A decomposition
is chosen over a composite kernel if its lowest-ranked hot leaf ranks higher. Registration order never matters.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from inferplane.binding.choice import DECOMPOSITION, REFERENCE, Choice, Dequantize, Options, Rejection
from inferplane.binding.lock import signature
from inferplane.binding.notes import note_activation_quant, note_cache_dtype, note_dtype
from inferplane.errors import BindError, KernelError
from inferplane.ops import EXTENSIONS, OPS, Op
from inferplane.types import PLAIN, Context, Kernel, Weight


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
            same.sort(key=lambda k: (-k.rank, k.name, _origin(k)))
        self.refused: dict[tuple[object, Kernel], list[str]] = {}
        self.used_pins: set[str] = set()
        self._pinned: dict[str, str] = {}
        self._pins_below: dict[str, dict[str, None]] = {}
        self._memo: dict[object, Choice] = {}
        self._alike: dict[object, Choice] = {}
        self._formats: dict[object, frozenset[str]] = {}
        self._native: dict[tuple[object, str], bool] = {}

    def resolve(self, op: Op, site: str = "") -> Choice:
        """The choice for `op` at `site` and for all ops below; sites that are bound alike share one `Choice`.

        Raises:
            BindError: a pin names a provider without a kernel here, or with a refused one.
        """
        self._find_site_pins(op, site)
        return self._at(op, site, None)

    def _at(self, op: Op, site: str, inherited: str | None) -> Choice:
        """As `resolve`; `inherited` is the name of a pin above that pins all ops below to their references."""
        memo_key = (op.key(), site if site in self._pinned or site in self._pins_below else None, inherited)
        found = self._memo.get(memo_key)
        if found is None:
            found = self._resolve(op, site, inherited)
            alike = (op.key(), found.kernel, found.why, tuple(found.rejected), tuple(map(id, found.children.values())))
            found = self._memo[memo_key] = self._alike.setdefault(alike, found)
        return found

    def _resolve(self, op: Op, site: str, inherited: str | None) -> Choice:
        pin = self._pin(op, site) or (None if inherited is None else (inherited, REFERENCE))
        below = [name for name in self._pins_below.get(site, ()) if pin is None or name != pin[0]]
        passed_on = pin[0] if pin and pin[1] == REFERENCE else None
        against = [f"pin {name!r} asks for a part of it" for name in below]
        children = {
            path: self._at(child, f"{site}.{path}" if site else path, passed_on) for path, child in op.children()
        }
        rejected: list[Rejection] = []
        accepted, dequantize = self._accept(op, site, children, against, rejected, pin[1] if pin else "")
        hot = op.hot or any(c.hot for c in children.values())
        leaves = [c for c in children.values() if c.hot] or list(children.values())
        # A hot op's body is slow with any children, and so is one that dequantizes what a kernel reads as stored.
        reads_stored = dequantize == "never" and not all(k.inlines for k in accepted)
        slow = op.hot or (reads_stored and self.formats(op) != op.formats())
        body_rank = 0 if slow else min((c.rank for c in leaves), default=0)
        dequantized = any(v.format != PLAIN and not self.reads_format(op, v.format) for v in _own_weights(op))
        choice = Choice(op.name, None, body_rank, "", rejected, children, hot, dequantized=dequantized, own_hot=op.hot)
        self._decide(choice, op, site, pin, accepted)
        for kernel in accepted:
            if kernel is not choice.kernel:
                reason = choice.why
                if choice.decided_by == "rank" and choice.kernel is not None:
                    level = "has the rank of" if kernel.rank == choice.kernel.rank else "ranks below"
                    reason = f"{level} {choice.label}"
                rejected.append(Rejection(kernel.name, kernel.rank, reason))
        if choice.kernel is not None:
            choice.rank = choice.kernel.rank
        if choice.kernel is not None and not choice.binds_children:
            choice.children, choice.dequantize = {}, dequantize
            choice.dequantized = dequantize != "never"
            self._note_hidden_pins(op, choice)
        note_activation_quant(op, choice, self.by_op[op.name])
        able = [k for k in self.by_op[op.name] if k not in self.options.demoted]
        note_cache_dtype(op, choice, able, self.ctx, self.formats(op))
        note_dtype(op, choice, able, self.ctx, self.formats(op))
        return choice

    def _note_hidden_pins(self, op: Op, c: Choice) -> None:
        """Add to the reason which pins have no effect, because the kernel replaces the pinned ops."""
        inside = {o.name for path, o in op.sites() if path} if self.options.pins else set()
        if hidden := sorted(inside & self.options.pins.keys()):
            names = ", ".join(map(repr, hidden))
            c.why += (
                f"; replaces the ops below it, so the pin of {names} has no effect: pin this to 'decomposition' too"
            )

    def _accept(
        self,
        op: Op,
        site: str,
        children: dict[str, Choice],
        against: list[str],
        rejected: list[Rejection],
        pinned: str,
    ) -> tuple[list[Kernel], Dequantize]:
        """The kernels that accept `op`, highest rank first, and which weights are dequantized for them.

        Kernels that read all weights as stored are preferred to those that need some dequantized. A hot op with
        quantized children has them dequantized if that gives it a kernel, because its own body would be slow.
        """
        candidates = []
        for kernel in self.by_op[op.name]:
            reasons = _not_inlined(kernel, site, children) if kernel.inlines else against
            reasons = reasons + self.refused.get((op.key(), kernel), [])
            if kernel.is_less_precise_than(op) and pinned not in (kernel.provider, kernel.name):
                reasons = [
                    *reasons,
                    f"computes in fewer bits (error up to {kernel.extra_error:g} more): pin it to use it",
                ]
            if kernel in self.options.demoted:
                reasons = [*reasons, f"demoted: {self.options.demoted[kernel]}"]
            candidates.append((kernel, reasons))
        tiers: list[tuple[Dequantize, frozenset[str]]] = [("never", op.formats())]
        if self.formats(op) != op.formats():
            tiers.append(("unserved", self.formats(op)))
        if op.hot and any(not c.formats() <= {PLAIN} for _, c in op.children()):
            tiers.append(("below", self._own_formats(op) | {PLAIN}))
        for dequantize, formats in tiers:
            outcome = {k: [*k.refusals(op, self.ctx, formats), *reasons] for k, reasons in candidates}
            accepted = [k for k, reasons in outcome.items() if not reasons]
            if accepted or dequantize == tiers[-1][0]:
                rejected += [Rejection(k.name, k.rank, "; ".join(reasons)) for k, reasons in outcome.items() if reasons]
                return sorted(accepted, key=_order), dequantize
        raise AssertionError("there is always a last tier")

    def _decide(self, c: Choice, op: Op, site: str, pin: tuple[str, str] | None, accepted: list[Kernel]) -> None:
        """Fill in the choice."""
        if pin is not None:
            c.pin, provider = pin
            c.decided_by = "pin"
            c.why = f"pinned to {provider} by {c.pin!r}"
            if provider in op.variants:
                c.variant = provider
            elif provider not in (REFERENCE, DECOMPOSITION):
                c.kernel = next((k for k in accepted if provider in (k.provider, k.name)), None)
                if c.kernel is None:
                    raise self._pin_error(op, site, c.pin, provider, c.rejected, accepted)
            return
        locked = None
        if self.options.lock:
            locked = self.options.lock.get(f"{op.name}|{self.ctx.step_kind}|{signature(op)}")
            c.kernel = next((k for k in accepted if k.name == locked), None)
            if c.kernel is not None:
                c.why, c.decided_by = "chosen by the lock file", "lock"
                return
        parts = c.children and not c.own_hot
        if not accepted:
            c.why = "no kernel accepts it: decomposed" if parts else "no kernel accepts it: reference"
        elif parts and c.rank > accepted[0].rank:
            best = accepted[0]
            c.why = f"decomposed: its slowest hot part has rank {c.rank}, above {best.name} with {best.rank}"
        else:
            c.kernel = accepted[0]
            c.why = f"rank {c.kernel.rank}" + (f" over the decomposition's {c.rank}" if parts else "")
            second = accepted[1] if len(accepted) > 1 else None
            if second is not None and _order(second) == _order(c.kernel):
                c.ambiguous = True
                c.why = f"AMBIGUOUS: {second.name} has rank {c.kernel.rank} too; pin one, or change a rank"
        if locked is not None:
            c.why += f"; the lock file's {locked} is not available"

    # -- weight formats

    def reads_format(self, op: Op, format: str) -> bool:
        """Whether some kernel reads weights of this format for `op` here; if not, they are dequantized at load.

        Kernels of other step kinds count: a weight that one column of the plan reads as stored is not kept twice.
        """
        found = self._native.get((op.key(), format))
        if found is None:
            found = self._native[op.key(), format] = any(
                format in k.when.formats
                and k not in self.options.demoted
                and (not k.is_less_precise_than(op) or self._is_pinned(op, k))
                and not k.refusals(
                    op, replace(self.ctx, step_kind=(*k.when.step_kinds, self.ctx.step_kind)[0]), {format}
                )
                for k in self.by_op[op.name]
            )
        return found

    def _is_pinned(self, op: Op, kernel: Kernel) -> bool:
        """Whether a pin of the op, wherever it is, names the kernel."""
        return self.options.pins.get(op.name) in (kernel.provider, kernel.name) or any(
            provider in (kernel.provider, kernel.name)
            for name, provider in self.options.pins.items()
            if name not in OPS
        )

    def formats(self, op: Op) -> frozenset[str]:
        """Formats in which the weights of `op` and all ops below reach their kernels if each op is bound alone."""
        if op.formats() <= {PLAIN}:
            return op.formats()
        found = self._formats.get(op.key())
        if found is None:
            found = self._own_formats(op).union(*(self.formats(c) for _, c in op.children()))
            self._formats[op.key()] = found
        return found

    def _own_formats(self, op: Op) -> frozenset[str]:
        return frozenset(w.format if self.reads_format(op, w.format) else PLAIN for w in _own_weights(op))

    def dequantizes(self, owner: Op, weight: Weight, dequantize: Dequantize, *, below: bool) -> bool:
        """Whether a weight of `owner` is dequantized at load by a choice at or above `owner`.

        Args:
            owner: the op that has the weight as a field.
            weight: the weight.
            dequantize: `Choice.dequantize` of that choice.
            below: `owner` is below the op of that choice.
        """
        if weight.format == PLAIN or dequantize == "never":
            return False
        if dequantize == "unserved" and not owner.body_reads_quantized:
            return True
        return (dequantize == "below" and below) or not self.reads_format(owner, weight.format)

    # -- pins

    def _pin(self, op: Op, site: str) -> tuple[str, str] | None:
        name = self._pinned.get(site, op.name)
        if name not in self.options.pins:
            return None
        self.used_pins.add(name)
        return name, self.options.pins[name]

    def _find_site_pins(self, op: Op, root: str) -> None:
        """Record which pin applies at each site, and which apply below it and would be hidden by a kernel there."""
        exact = {name for name in self.options.pins if name not in OPS}
        patterns = sorted(
            (n for n in exact if any(c in n for c in "*?[")), key=lambda n: (-len(n), n)
        )  # longest pattern first
        for site, _ in op.sites(f"{root}." if root else "") if exact else ():
            if site in exact:
                names = [site]
            else:
                names = [name for name in patterns if site and fnmatch.fnmatchcase(site, name)]
            if not names:
                continue
            self._pinned[site] = names[0]
            above = site
            while above:
                above = above.rpartition(".")[0]
                self._pins_below.setdefault(above, {}).update(dict.fromkeys(names))

    def _pin_error(
        self, op: Op, site: str, name: str, provider: str, rejected: list[Rejection], accepted: list[Kernel]
    ) -> BindError:
        refused = [r for r in rejected if provider in (r.kernel.split(":")[0], r.kernel)]
        there = [k.name for k in accepted] + sorted(op.variants) + [REFERENCE]
        why = (
            "; ".join(f"its kernel {r.kernel} is refused: {r.reason}" for r in refused)
            or "it has no kernel for this op"
        )
        return BindError(
            f"Op {op.name!r} at {site or 'the root'} is pinned to {provider!r} by {name!r}, but {why}.",
            there_is=", ".join(there),
            remedy="pin one of these, or drop the pin",
        )


def _not_inlined(kernel: Kernel, site: str, children: dict[str, Choice]) -> list[str]:
    """Why a kernel that inlines its children cannot run them as they are bound; empty when it can."""
    prefix = f"{site}." if site else ""
    wrong = [
        f"{prefix}{path} is bound to {child.label}, which it cannot run"
        for path, child in children.items()
        if (names := kernel.find_inlined(path)) and (child.kernel is None or child.kernel.name not in names)
    ]
    return [wrong[0] + (f", and {len(wrong) - 1} more such" if len(wrong) > 1 else "")] if wrong else []


def check_declaration(kernel: Kernel) -> None:
    """Raise KernelError if a kernel names an unknown op, extension or weight, or has other parameters than the op."""
    op = OPS.get(kernel.op)
    if op is None:
        raise KernelError(
            f"Kernel {kernel.name} is declared for an unknown op {kernel.op!r}.",
            there_is=", ".join(sorted(OPS)),
            remedy="declare it for one of these",
        )
    if unknown := sorted(set(kernel.when.extensions) - EXTENSIONS):
        raise KernelError(
            f"Kernel {kernel.name} of op {kernel.op!r} computes the extension {unknown[0]!r}, which is unknown.",
            there_is=", ".join(sorted(EXTENSIONS)) or "none",
            remedy='write "op.field", or the name of an op that is an extension',
        )
    for path, packing in kernel.packs.items():
        if path.partition(".")[0] not in op.fields():
            raise KernelError(
                f"Kernel {kernel.name} packs {path!r}, but op {kernel.op!r} has no such field.",
                there_is=", ".join(op.fields()),
                remedy="name the weight by its path below the op",
            )
        if kernel.inlines:
            raise KernelError(
                f"Kernel {kernel.name} packs {path!r}, but runs children that are bound, and packed, by themselves.",
                remedy="leave out packs or inlines",
            )
        if packing.has_reserved_name:
            raise KernelError(
                f"Kernel {kernel.name} calls a packing {packing.name!r}, which is a name reserved by core.",
                remedy="name it provider.layout",
            )
    if isinstance(kernel.target, str):
        return  # a dotted target is imported and checked at link
    check_parameters(kernel)


def check_parameters(kernel: Kernel) -> None:
    """Raise KernelError if the kernel's function does not take a view and then exactly the op's parameters."""
    want = _list_parameters(OPS[kernel.op].__call__)
    try:
        have = [_describe(p) for p in inspect.signature(kernel.function()).parameters.values()][1:]
    except ValueError:
        return  # a builtin without a signature: the canary and conformance check it
    if have != want:
        raise KernelError(
            f"Kernel {kernel.name} takes ({', '.join(have)}) after its view, but op {kernel.op!r} passes "
            f"({', '.join(want)}).",
            remedy="give the function exactly these parameters, in this order",
        )


@cache
def _list_parameters(call: Callable[..., Any]) -> list[str]:
    """Names of what an op's `__call__` takes."""
    return list(inspect.signature(call).parameters)[1:]


def _describe(parameter: inspect.Parameter) -> str:
    """A parameter's name, with its kind if it cannot be passed by position."""
    by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return parameter.name if by_position else f"{parameter.kind.description} {parameter.name}"


def _order(kernel: Kernel) -> tuple[int, bool]:
    """Sorts accepted kernels: by rank, and among equals those that quantize activations first."""
    return -kernel.rank, not kernel.quantizes_activations_to


def _origin(kernel: Kernel) -> str:
    """Distinguishes kernels of equal names, so that their order never depends on the order of registration."""
    target = kernel.target
    return (
        target
        if isinstance(target, str)
        else f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
    )


def _own_weights(op: Op) -> list[Weight]:
    return [v for _, v in op.items() if isinstance(v, Weight)]
