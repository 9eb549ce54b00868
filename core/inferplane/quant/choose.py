"""Chooses the format of each weight that is quantized while it is read: the best one that a kernel of its op reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inferplane.binding import PlanSettings
from inferplane.ops import LMHead, Op
from inferplane.quant.online import HEAD, SCHEMES, OnlineScheme, find_role
from inferplane.types import PLAIN, ActivationQuant, Context, Kernel, Weight

Reads = Callable[[Op, str, ActivationQuant | None], bool]
"""Whether a kernel reads the weights of an op in a format, where the scheme requests that activations are quantized."""


@dataclass(frozen=True)
class FormatChoice:
    """The format of the weights of ops of one name, and why it was chosen.

    Args:
        op: the op's name.
        format: the chosen format; "plain" for a head that is not quantized, because no kernel would read it so.
        weights: how many weights have it.
        passed_over: formats that come before it in the scheme, of which no kernel of the op reads any here.
        read: whether a kernel reads the chosen one; if not, the weights are dequantized at load.
    """

    op: str
    format: str
    weights: int
    passed_over: tuple[str, ...] = ()
    read: bool = True

    @property
    def why(self) -> str:
        """The reason, in words."""
        if not self.read:
            return f"no kernel of {self.op} reads {', '.join((self.format, *self.passed_over))} here"
        if self.passed_over:
            return f"no kernel of {self.op} reads {', '.join(self.passed_over)} here"
        return f"the smallest error, and a kernel of {self.op} reads it"

    def data(self) -> dict[str, Any]:
        """The entry of `explain`."""
        return {"op": self.op, "format": self.format, "weights": self.weights, "read": self.read, "why": self.why}


@dataclass(frozen=True)
class Chosen:
    """The formats of a model's weights under a scheme: by the checkpoint's names of tensors, and by op."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    choices: Sequence[FormatChoice] = ()

    @property
    def all_read(self) -> bool:
        """Whether kernels read every weight that the scheme quantizes, and there is one."""
        return bool(self.choices) and all(choice.read for choice in self.choices)


def choose_formats(ops: Iterable[Op], scheme: OnlineScheme, reads: Reads) -> Chosen:
    """Choose a format for every weight that the scheme quantizes, but for those that attention folds.

    Args:
        ops: a tree of ops, or several, built with the scheme's first formats.
        scheme: the candidates by role.
        reads: which formats the device's kernels read (`make_reads`).
    """
    candidates = {"dense": scheme.dense, "experts": scheme.experts, "head": scheme.head}
    by_name: dict[str, str] = {}
    counts: dict[tuple[str, str, tuple[str, ...], bool], set[int]] = defaultdict(set)
    known: dict[tuple[object, str], tuple[str, tuple[str, ...], bool]] = {}
    for op in (op for root in ops for _, op in root.sites()):
        own = [v for _, v in op.items() if isinstance(v, Weight) and v.format != PLAIN and v.parts]
        for weight in own:
            role = "head" if isinstance(op, LMHead) else find_role(weight.parts[0])
            if not candidates.get(role):
                continue
            if (op.key(), role) not in known:
                before = () if role == "head" else scheme.in_memory
                known[op.key(), role] = _choose(op, before, candidates[role], scheme, reads)
            format, passed_over, read = known[op.key(), role]
            by_name.update(dict.fromkeys((HEAD,) if role == "head" else weight.parts, format))
            counts[op.name, format, passed_over, read].add(id(weight))
    choices = [FormatChoice(op, f, len(ids), over, read) for (op, f, over, read), ids in sorted(counts.items())]
    if any(choice.read for choice in choices) and not all(c.read for c in choices if c.op == LMHead.name):
        # Rounded and as large as before, a head would be worse for nothing.
        by_name[HEAD] = PLAIN
        choices = [_leave_plain(c) if c.op == LMHead.name else c for c in choices]
    return Chosen(by_name, choices)


def _leave_plain(choice: FormatChoice) -> FormatChoice:
    return replace(choice, format=PLAIN, passed_over=(choice.format, *choice.passed_over), read=True)


def _choose(
    op: Op, in_memory: tuple[str, ...], formats: tuple[str, ...], scheme: OnlineScheme, reads: Reads
) -> tuple[str, tuple[str, ...], bool]:
    """The first format that is read, those before it, True; where none is, the first of `formats`, others, False."""
    tried = (*in_memory, *formats)
    for i, format in enumerate(tried):
        if reads(op, format, scheme.activation_quants.get(format)):
            return format, tried[:i], True
    return formats[0], tuple(format for format in tried if format != formats[0]), False


def make_reads(kernels: Iterable[Kernel], settings: PlanSettings, pins: Mapping[str, str]) -> Reads:
    """A function that tells which formats a device's kernels read.

    Args:
        kernels: the device's kernels.
        settings: what the plan is made for.
        pins: op name -> the only provider or kernel allowed for it.
    """
    by_op: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if pins.get(kernel.op) in (None, kernel.provider, kernel.name):
            by_op[kernel.op].append(kernel)

    def reads(op: Op, format: str, quant: ActivationQuant | None) -> bool:
        changed = {
            path: replace(v, format=format, activation_quant=quant)
            for path, v in op.items()
            if isinstance(v, Weight) and v.format != PLAIN
        }
        tried = replace(op, **changed)  # type: ignore[type-var]  # every op is a dataclass
        return any(
            not k.is_less_precise_than(tried) and not k.refusals(tried, _context_of(k, settings), {format})
            for k in by_op[op.name]
        )

    return reads


def _context_of(kernel: Kernel, settings: PlanSettings) -> Context:
    kind = (*kernel.when.step_kinds, "mixed")[0]
    return Context(settings.dtype, kind, {}, settings.features, settings.deterministic)


def schemes_instead(ops: Sequence[Op], scheme: str, reads: Reads) -> list[str]:
    """Other schemes of weights alone, all of whose formats here are read, the one with the smallest error first.

    Args:
        ops: built with the first formats of `scheme`.
        scheme: the name of a scheme. reads: see `make_reads`.
    """
    others = (name for name in SCHEMES if SCHEMES[name] != SCHEMES[scheme] and "c8" not in name)
    return [name for name in others if choose_formats(ops, SCHEMES[name], reads).all_read]
