"""A kernel's declaration: the op it computes, when it may be used, and the weight layouts it reads."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from inferplane.errors import KernelError, in_words
from inferplane.renamed import NewName, old_attributes, old_names, warn_of_old_name
from inferplane.types.batch import StepKind
from inferplane.types.device import Features
from inferplane.types.kv import Layouts
from inferplane.types.weight import PLAIN, Packing, Weight

RANK_TUNED = 90
"""Rank of vendor- or hand-tuned kernels that were measured."""
RANK_FUSED = 70
"""Rank of a vendor's fused operators: below the band of measured kernels, since they were not measured here."""
RANK_PORTABLE = 50
"""Rank of portable compiled kernels."""
RANK_COMPOSED = 10
"""Rank of kernels composed from torch's own operators."""


@dataclass(frozen=True)
class Context:
    """What a kernel may depend on besides the op's fields; known before the first step.

    Args:
        dtype: the plan's activation dtype.
        step_kind: "decode" or "mixed".
        layouts: the KV layout chosen for each distinct request of the model.
        features: the device's features.
        deterministic: only batch-invariant kernels may be bound.
        host_lens: sequence lengths are known on the host when a step is launched.
    """

    dtype: torch.dtype
    step_kind: StepKind
    layouts: Layouts = field(default_factory=dict)
    features: Features = field(default_factory=Features)
    deterministic: bool = False
    host_lens: bool = True


@dataclass(frozen=True)
class When:
    """When a kernel may be used. An empty field allows anything; only `formats` defaults to plain weights.

    Args:
        dtypes: accepted activation dtypes.
        formats: accepted weight formats.
        kv_layouts: names of the KV layouts whose memory it accesses; empty for a kernel that uses only
            `LayerKV.write` and `read`.
        step_kinds: accepted step kinds, "decode" and "mixed".
        features: hardware features that must be present.
        needs: `(words, predicate)`; the predicate receives the op and returns True if the kernel can compute it. The
            words complete the sentence "needs ...".
        extensions: what ops got after their first kernels were written, and the kernel computes too: "op.field" of a
            field ("rms_norm.offset"), or the name of an op below. An op that uses another one is refused.
    """

    dtypes: tuple[torch.dtype, ...] = ()
    formats: tuple[str, ...] = (PLAIN,)
    kv_layouts: tuple[str, ...] = ()
    step_kinds: tuple[StepKind, ...] = ()
    features: tuple[str, ...] = ()
    needs: tuple[tuple[str, Callable[[Any], bool]], ...] = ()
    extensions: tuple[str, ...] = ()

    def refusals(self, op: Any, ctx: Context, formats: Iterable[str]) -> list[str]:
        """Every reason, in words, why this kernel cannot serve `op` in `ctx`; empty when it can."""
        out = []
        if self.dtypes and ctx.dtype not in self.dtypes:
            out.append(f"dtype {_short(ctx.dtype)} is not among {', '.join(map(_short, self.dtypes))}")
        if bad := sorted(set(formats) - set(self.formats)):
            out.append(f"weight format {', '.join(bad)} is not among {', '.join(self.formats)}")
        if self.kv_layouts:
            names = sorted({ctx.layouts[r].name for r in op.kv_requests() if r in ctx.layouts})
            if bad := [n for n in names if n not in self.kv_layouts]:
                out.append(f"KV layout {', '.join(bad)} is not among {', '.join(self.kv_layouts)}")
        if self.step_kinds and ctx.step_kind not in self.step_kinds:
            out.append(f"step kind {ctx.step_kind} is not among {', '.join(self.step_kinds)}")
        out += ctx.features.lacking(self.features)
        for words, predicate in self.needs:
            try:
                if not predicate(op):
                    out.append(f"needs {words}")
            except Exception as error:
                out.append(f"its predicate {words!r} raised {in_words(error)}")
        return out

    def refuse_extensions(self, used: Iterable[str]) -> list[str]:
        """The reason why this kernel cannot serve an op that uses these extensions, or empty."""
        unknown = sorted(set(used) - set(self.extensions))
        return [f"does not compute {', '.join(unknown)}"] if unknown else []


@old_attributes({"coarser": "is_less_precise_than"})
@old_names(
    {
        "codes": "quantizes_activations_to",
        "chain": NewName("stack_function", warns=False),
        "whole": NewName("model_function", warns=False),
    }
)
@dataclass(frozen=True, eq=False)
class Kernel:
    """One implementation of an op by a provider.

    Args:
        op: the op's name ("rms_norm").
        provider: who implements it ("torch", "triton", a library's name); unique per op and target.
        target: the function, or its dotted name "module:function", imported at link only. It takes a view (the op's
            field names, weights in this kernel's packings) and then exactly the parameters of the op's `__call__`.
        when: when it may be used.
        rank: `RANK_TUNED` 90, `RANK_FUSED` 70, `RANK_PORTABLE` 50, `RANK_COMPOSED` 10, or between; the highest wins.
        packs: weight path below the op ("weight", "gate_up.weight") -> packing; other weights are canonical.
        prepare: `(op, ctx) -> object`, called once at link for each chosen kernel; the view has the result as
            `prepared`.
        stack_function: `chain` of a "decoder_layer" kernel of plugin API 1.0, which runs all layers in one call:
            `(views, x, residual, batch, caches) -> (x, residual)`. It becomes a kernel of "decoder_stack" that inlines
            the kernels with this same function (`inferplane.plugins.old_kernels`), and ends with the next minor
            release, as `model_function` does.
        model_function: `whole` beside a chain, which runs a model's step in one call: `(model, batch, cache) ->
            (logits, hidden)` before `gather`, or None. It becomes a kernel of "causal_lm".
        capture_safe: it may run under graph capture.
        batch_invariant: a row's result does not depend on the other rows.
        needs_host_lens: it reads `batch.host_lens`.
        extra_error: error that its number format adds to the op's tolerance. If it is not 0, the kernel is chosen only
            by a pin, or if every quantized weight requests that its activations are quantized to that format.
        quantizes_activations_to: format to which the kernel quantizes its unquantized activations ("fp8", "int8");
            empty: it does not.
        note: a sentence for `explain` (source, measured figure).
        inlines: child path below the op ("head", or a pattern: "*") -> names of the kernels that this kernel can run
            inside its own call. The children are bound as under the op's body, and this kernel is refused if one of
            them is bound to anything else. Its view holds the *view* of each such child, which knows its `kernel`;
            other children are bound callables. `view.body` is the bound body, for calls that the kernel cannot run.
            Results equal those of the body to the last bit. Such a kernel has no `packs`.

    Raises:
        KernelError: `model_function` without `stack_function`.
    """

    op: str
    provider: str
    target: Callable[..., Any] | str
    when: When = field(default_factory=When)
    rank: int = RANK_COMPOSED
    packs: Mapping[str, Packing] = field(default_factory=dict)
    prepare: Callable[[Any, Context], Any] | None = None
    stack_function: Callable[..., Any] | None = None
    model_function: Callable[..., Any] | None = None
    capture_safe: bool = False
    batch_invariant: bool = False
    needs_host_lens: bool = False
    extra_error: float = 0.0
    quantizes_activations_to: str = ""
    note: str = ""
    inlines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.stack_function is not None:
            warn_of_old_name("Kernel.chain", 'a kernel of "decoder_stack" with `inlines`', stacklevel=5)
        elif self.model_function is not None:
            raise KernelError(
                f"Kernel {self.name} for op {self.op!r} has a whole step, but no chain.",
                remedy='declare a kernel of "causal_lm" with `inlines`, or a chain too',
            )

    @property
    def name(self) -> str:
        """`provider:function`, the name used in explain, pins, lock file and xfails."""
        if isinstance(self.target, str):
            return f"{self.provider}:{self.target.rpartition(':')[2]}"
        return f"{self.provider}:{getattr(self.target, '__name__', type(self.target).__name__)}"

    def __str__(self) -> str:
        return self.name

    def function(self) -> Callable[..., Any]:
        """The callable itself; imports it if the target is a dotted name.

        Raises:
            KernelError: the module or the function cannot be imported, or it is not callable.
        """
        if not isinstance(self.target, str):
            return self.target
        try:
            found = import_target(self.target)
            if not callable(found):
                raise TypeError(f"{type(found).__name__} is not callable")
        except Exception as error:
            raise KernelError(
                f"Kernel {self.name} for op {self.op!r}: {self.target} cannot be imported ({in_words(error)}).",
                remedy=f"install the runtime of provider {self.provider!r}, or pin another provider for {self.op!r}",
            ) from error
        return found

    def is_less_precise_than(self, op: Any) -> bool:
        """Whether it computes in fewer bits than `op` and its checkpoint request."""
        quantized = self.quantizes_activations_to
        requested = quantized and op.activation_quants() == {quantized}
        return self.extra_error > 0 and not (requested or self._quantizes_as(op))

    def extra_error_of(self, op: Any) -> float:
        """`extra_error`, where `op` has no such rounding itself: one that quantizes activations itself has."""
        return 0.0 if self._quantizes_as(op) else self.extra_error

    def _quantizes_as(self, op: Any) -> bool:
        """Whether the op's own meaning is to quantize activations, to the kernel's format."""
        own = getattr(op, "activation_quant", None)
        return own is not None and own.format == self.quantizes_activations_to

    def find_inlined(self, path: str) -> tuple[str, ...]:
        """Names of the kernels that it can run inside its own call for the child at `path`; empty: it runs none."""
        return next((names for pattern, names in self.inlines.items() if fnmatch.fnmatchcase(path, pattern)), ())

    def _find_extensions(self, op: Any) -> frozenset[str]:
        """The extensions that it must compute itself: children that it does not inline are bound by themselves."""
        # Tests of plugins for API 1.0 pass stand-ins of ops that have what ops had then.
        used: frozenset[str] = op.extensions() if hasattr(op, "extensions") else frozenset()
        if not used or not self.inlines:
            return used
        inlined = (child for path, child in op.children() if self.find_inlined(path))
        return used & op.own_extensions().union(*(child.extensions_below() for child in inlined))

    def refusals(self, op: Any, ctx: Context, formats: Iterable[str]) -> list[str]:
        """Every reason, in words, why it cannot serve `op` in `ctx`: from `when` and from the plan's options.

        For a kernel that inlines its children only the op's own weights count: the children read the others.
        """
        if self.inlines:
            formats = {value.format for _, value in op.items() if isinstance(value, Weight)}
        out = self.when.refusals(op, ctx, formats) + self.when.refuse_extensions(self._find_extensions(op))
        if ctx.deterministic and not self.batch_invariant:
            out.append("deterministic=True binds only batch-invariant kernels")
        if self.needs_host_lens and not ctx.host_lens:
            out.append("needs sequence lengths on the host, which does not know them")
        return out


def import_target(target: str) -> Any:
    """Import the object that a dotted name "module:attribute" names. Raises what the import raises."""
    module, _, attribute = target.partition(":")
    return attrgetter(attribute)(importlib.import_module(module))


class Kernels(list[Kernel]):
    """A list of kernels that functions join by decorator: `@kernels("rms_norm", "toy", rank=90)`."""

    def __call__(self, op: str, provider: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator that appends the function as a kernel; `options` are fields of `Kernel`."""

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            self.append(Kernel(op, provider, function, **options))
            return function

        return declare


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
