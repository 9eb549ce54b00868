"""The op class: a small frozen class. Its fields are known before the first token, and its body defines its meaning.

The same body has two uses. As the *oracle* it runs on float32 inputs with children that are oracles too, and kernels
are compared with it. *Bound*, it executes: the names it reads from `self` are then a backend's kernels, or
decompositions, or references. A body calls its fields, so the body is the decomposition, and the field path is the
site's name. Building a tree of ops needs no tensor and no tracing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from typing_extensions import dataclass_transform

from inferplane.errors import UsageError
from inferplane.ops.draw import Draw
from inferplane.renamed import old_attributes
from inferplane.types import PLAIN, KVRequest, QTensor, StateRequest, StepKind, Weight
from inferplane.types.scratch import Scratch

Request = TypeVar("Request", KVRequest, StateRequest)

OPS: dict[str, type[Op]] = {}
"""Every op by name."""

EXTENSIONS: set[str] = set()
"""Every extension by name: "op.field" of a field that is one, and "op" of an op that is one."""

EXACT = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}
"""Tolerance of ops that move values without arithmetic."""
ROUNDED = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Tolerance of ops with one rounding of the result."""
ACCUMULATED = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Tolerance of ops with long sums, or with a few intermediate roundings."""
BLOCK = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Tolerance of blocks: each of their children rounds its result."""


@dataclass(frozen=True)
class Workload:
    """How much work an op has in one step.

    Args:
        tokens: token rows.
        kv_tokens: sum over sequences of their length in tokens.
        pairs: sum over sequences of query tokens times length (before causality halves it).
        dtype: activation dtype.
    """

    tokens: int
    kv_tokens: int = 0
    pairs: int = 0
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Cost:
    """Lower bound of what an op moves and computes: bytes of weights, cache and activations; floating-point
    operations."""

    nbytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.nbytes + other.nbytes, self.flops + other.flops)


@dataclass(frozen=True)
class Sample:
    """One test case of an op.

    Args:
        label: short name, unique within the op, used in tests, tables and xfails.
        op: the op with its sizes; its weights are drawn at random.
        inputs: draws the arguments of `__call__`.
        step_kind: the kind of step that the case belongs to.
    """

    label: str
    op: Op
    inputs: Callable[[Draw], tuple[Any, ...]]
    step_kind: StepKind = "mixed"


@dataclass(frozen=True)
class Comparison:
    """Result of comparing a kernel's result with the oracle's: the largest error, and where it occurred."""

    error: float
    detail: str = ""


def extension(default: Any) -> Any:
    """A field that an op got after kernels had been written for it. Where its value is not `default`, only kernels that
    list the extension "op.field" in `When.extensions` are chosen: others would compute without it and be wrong.

    Args:
        default: the value that stands for the op as it was before.
    """
    return dataclasses.field(default=default, metadata={"extension": True})


MEANINGS = (
    *("has_grouped_queries", "has_latent_attention", "has_sparse_attention", "has_compressed_attention"),
    *("has_shared_kv", "is_gated_mlp", "has_experts", "has_recurrence", "is_delta_net", "is_kimi_delta_attention"),
    *("is_mamba2", "is_short_convolution"),
)
"""Class attributes of `Op` that say which meaning an op has; subclasses do not inherit them."""


@old_attributes({"acts": "activation_quants"})
@dataclass_transform(frozen_default=True, eq_default=False)
class Op(Scratch):
    """Root of every op. Subclass with `name=`; annotate fields; write `__call__(self, activations...)`.

    A field that is added later is an `extension(default)`. A new op that stands where kernels of the ops above it know
    another one (another attention in a decoder layer) is declared with `extension=True`.

    Fields may be weights, numbers, strings, dtypes, `KVRequest`s, `StateRequest`s, `ActivationQuant`s, child ops (or
    None), and tuples of child ops. Core and backends decide by the class attributes below, never by an op's name.
    """

    name: ClassVar[str] = "op"
    """The op's name in kernels, pins, explain and xfails."""
    hot: ClassVar[bool] = False
    """Its speed dominates the model's speed: it sets the rank of a decomposition, and running its reference warns."""
    tolerance: ClassVar[Mapping[torch.dtype, float]] = ACCUMULATED
    """Largest accepted error by dtype, as defined by `compare`."""
    variants: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """Other bodies with the same meaning, by name; a pin chooses one."""
    body_reads_quantized: ClassVar[bool] = True
    """Its body reads quantized weights as stored; if not, they are dequantized at load for the body."""
    body_capture_safe: ClassVar[bool] = False
    """Its body may run under graph capture on every device."""
    writes_cache: ClassVar[bool] = False
    """It only stores entries in the cache: what can be read back afterwards is its result."""
    may_change_inputs: ClassVar[bool] = False
    """A kernel may overwrite the op's arguments."""
    called_by_engine: ClassVar[tuple[str, ...]] = ()
    """Fields that the body does not call: the engine calls these child ops itself."""
    compares_entries: ClassVar[bool] = True
    """`compare` holds each entry of a result to the oracle's at its place."""
    tunable: ClassVar[bool] = False
    """Its kernels can be timed on `tuning_inputs`."""
    has_grouped_queries: ClassVar[bool] = False
    """It is an attention block with the fields and the meaning of `gqa_block`."""
    has_latent_attention: ClassVar[bool] = False
    """It is an attention block with the fields and the meaning of `mla_block`."""
    has_sparse_attention: ClassVar[bool] = False
    """It is an attention block with the fields and the meaning of `sparse_mla_block`."""
    has_compressed_attention: ClassVar[bool] = False
    """It is an attention block with the fields and the meaning of `compressed_block`."""
    has_shared_kv: ClassVar[bool] = False
    """It is an attention block with the fields and the meaning of `shared_kv_block`."""
    is_gated_mlp: ClassVar[bool] = False
    """It has the fields and the meaning of `gated_mlp`."""
    has_experts: ClassVar[bool] = False
    """It has the fields and the meaning of `moe`."""
    has_recurrence: ClassVar[bool] = False
    """It is a block with the fields and the meaning of `recurrent_block`."""
    is_delta_net: ClassVar[bool] = False
    """It has the fields and the meaning of `gated_delta_net`."""
    is_kimi_delta_attention: ClassVar[bool] = False
    """It has the fields and the meaning of `kimi_delta_attention`."""
    is_mamba2: ClassVar[bool] = False
    """It has the fields and the meaning of `mamba2_mixer`."""
    is_short_convolution: ClassVar[bool] = False
    """It has the fields and the meaning of `short_conv`."""
    numbered: ClassVar[str] = ""
    """A tuple field whose entries have their number alone as path: "3", not "layers.3"."""
    is_extension: ClassVar[bool] = False
    """Kernels of the ops above it must list its name in `When.extensions`."""
    _fields: ClassVar[tuple[str, ...]] = ()
    _extension_fields: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, *, name: str, hot: bool = False, extension: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        if name in OPS:
            raise UsageError(f"An op named {name!r} exists already: {OPS[name].__module__}.{OPS[name].__qualname__}.")
        cls.name, cls.hot = name, hot
        for meaning in MEANINGS:  # a subclass is another op: it has its parent's meaning only if it says so
            setattr(cls, meaning, bool(vars(cls).get(meaning, False)))
        dataclass(frozen=True, eq=False)(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        cls._fields = tuple(f.name for f in fields)
        cls.is_extension = extension
        cls._extension_fields = {f.name: f.default for f in fields if f.metadata.get("extension")}
        EXTENSIONS.update(f"{name}.{field}" for field in cls._extension_fields)
        EXTENSIONS.update([name] if extension else [])
        OPS[name] = cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The op's meaning, in plain torch."""
        raise NotImplementedError(type(self).__name__)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Cases on which every kernel of this op is tested; the smallest first (the start-up canary runs it)."""
        raise NotImplementedError(cls.__name__)

    def tuning_inputs(self, draw: Draw, rows: int) -> tuple[Any, ...]:
        """Arguments of a call over `rows` token rows, for timing kernels of a `tunable` op."""
        raise NotImplementedError(type(self).__name__)

    @property
    def serves_many_queries(self) -> bool:
        """True if it is called only for sequences with many query tokens."""
        return False

    def cost(self, load: Workload) -> Cost:
        """Bytes and operations of one call, children included. Default: the sum over the children."""
        total = Cost()
        for _, child in self.children():
            total = total + child.cost(load)
        return total

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """Largest error over the results: largest absolute difference divided by the largest absolute expected value.

        Args:
            got: a kernel's result, moved to the host.
            want: the oracle's result, float32.
        """
        results, expected_results = as_tuple(got), as_tuple(want)
        if len(results) != len(expected_results):
            return Comparison(float("inf"), f"{len(results)} results instead of {len(expected_results)}")
        worst = Comparison(0.0)
        for i, (g, w) in enumerate(zip(results, expected_results)):
            error = relative_error(g, w)
            if not error <= worst.error:
                worst = Comparison(error, f"result {i}" if len(expected_results) > 1 else "")
        return worst

    # -- structure

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Names of the fields, in order."""
        return cls._fields

    def items(self) -> Sequence[tuple[str, Any]]:
        """`(path, value)` of each field; each op in a tuple has its own path: `("layers.3", DecoderLayer)`."""
        return self.once("items", self._list_items)

    def _list_items(self) -> Sequence[tuple[str, Any]]:
        out: list[tuple[str, Any]] = []
        for name in self._fields:
            value = getattr(self, name)
            if isinstance(value, tuple) and value and isinstance(value[0], Op):
                prefix = "" if name == self.numbered else f"{name}."
                out += [(f"{prefix}{i}", op) for i, op in enumerate(value)]
            else:
                out.append((name, value))
        return out

    def children(self) -> Sequence[tuple[str, Op]]:
        """`(path, child op)` of each field that is an op."""
        return self.once("children", self._list_children)

    def _list_children(self) -> Sequence[tuple[str, Op]]:
        return [(path, value) for path, value in self.items() if isinstance(value, Op)]

    def weights(self, prefix: str = "") -> Iterator[tuple[str, Weight]]:
        """`(path, weight)` of this op and all ops below, in order; a shared weight appears at each use."""
        left = [(prefix + path, value) for path, value in reversed(self.items())]
        while left:  # a stack, as in sites
            path, value = left.pop()
            if isinstance(value, Weight):
                yield path, value
            elif isinstance(value, Op):
                left += [(f"{path}.{name}", below) for name, below in reversed(value.items())]

    def sites(self, prefix: str = "") -> Iterator[tuple[str, Op]]:
        """`(site, op)` of this op and all ops below; the root's site is ""."""
        left = [(prefix.rstrip("."), self)]
        while left:  # a stack, because recursive generators pass every site up through all levels above it
            site, op = left.pop()
            yield site, op
            below = f"{site}." if site else ""
            left += reversed([(below + path, child) for path, child in op.children()])

    def kv_requests(self) -> tuple[KVRequest, ...]:
        """The distinct cache requests of this op and all ops below, in order."""
        return self._requests(KVRequest)

    def state_requests(self) -> tuple[StateRequest, ...]:
        """The distinct requests for states of sequences of this op and all ops below, in order."""
        return self._requests(StateRequest)

    def _requests(self, kind: type[Request]) -> tuple[Request, ...]:
        return self.once(kind.__name__, self._find_requests, kind)

    def _find_requests(self, kind: type[Request]) -> tuple[Request, ...]:
        found: dict[Request, None] = {}
        for _, value in self.items():
            if isinstance(value, kind):
                found[value] = None
            elif isinstance(value, Op):
                found.update(dict.fromkeys(value._requests(kind)))
        return tuple(found)

    def formats(self) -> frozenset[str]:
        """Weight formats of this op and all ops below."""
        return self.once("formats", self._find_formats)

    def _find_formats(self) -> frozenset[str]:
        own = {value.format for _, value in self.items() if isinstance(value, Weight)}
        return frozenset(own.union(*[child.formats() for _, child in self.children()]))

    def extensions(self) -> frozenset[str]:
        """Extensions that this op and all ops below use; `extension` tells what they are. Its own kind does not count:
        the author of a kernel for it knows it."""
        return self.once("extensions", self._find_extensions)

    def _find_extensions(self) -> frozenset[str]:
        return self.own_extensions().union(*[child.extensions_below() for _, child in self.children()])

    def own_extensions(self) -> frozenset[str]:
        """Those among `extensions` that its own fields use."""
        defaults = self._extension_fields
        if not defaults:
            return frozenset()
        return frozenset(f"{self.name}.{name}" for name, value in defaults.items() if getattr(self, name) != value)

    def extensions_below(self) -> frozenset[str]:
        """As `extensions`, seen by a kernel of an op above: its own kind counts."""
        return self.extensions() | {self.name} if self.is_extension else self.extensions()

    def activation_quants(self) -> frozenset[str]:
        """Formats ("fp8", "int8") that the checkpoint requests for the activations multiplied by the quantized weights
        of this op and all ops below; "" stands for quantized weights without such a request."""
        return self.once("activation_quants", self._find_activation_quants)

    def _find_activation_quants(self) -> frozenset[str]:
        if self.formats() <= {PLAIN}:
            return frozenset()
        own = [v.activation_quant for _, v in self.items() if isinstance(v, Weight) and v.format != PLAIN]
        requested = {"" if quant is None else quant.format for quant in own}
        return frozenset(requested.union(*(child.activation_quants() for _, child in self.children())))

    def key(self) -> tuple[Any, ...]:
        """Static signature: ops with equal keys bind alike in every layer. Computed once."""
        return self.once("key", self._make_key)

    def _make_key(self) -> Key:
        return Key((self.name, *(v.key() if isinstance(v, (Op, Weight)) else v for _, v in self.items())))


class Key(tuple[Any, ...]):
    """A tuple that computes its hash once: keys of whole models are deeply nested and looked up often."""

    def __hash__(self) -> int:
        try:
            return self._hash  # type: ignore[has-type]
        except AttributeError:
            self._hash = tuple.__hash__(self)
            return self._hash


def values(weight: torch.Tensor | QTensor) -> torch.Tensor:
    """A weight's values in float32, dequantized if necessary."""
    return weight.dequantize() if isinstance(weight, QTensor) else weight.float()


def expert_values(weight: Any, expert: int) -> torch.Tensor:
    """One expert's values of a stack `[E, N, K]` in float32 `[N, K]`, dequantized if necessary."""
    if isinstance(weight, torch.Tensor):
        return weight[expert].float()
    return weight.of_expert(expert).dequantize()


def as_tuple(result: Any) -> tuple[Any, ...]:
    """A result as a tuple, even if there is only one."""
    return result if isinstance(result, tuple) else (result,)


def relative_error(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    """Largest absolute difference over the largest absolute expected value; infinite if shapes differ, NaN or Inf
    occurs, or one of them alone is None."""
    if got is None or want is None:
        return 0.0 if got is want else float("inf")
    if tuple(got.shape) != tuple(want.shape):
        return float("inf")
    if want.numel() == 0:
        return 0.0
    difference = (got.float() - want.float()).abs().max().item()
    scale = want.float().abs().max().item()
    if difference != difference:
        return float("inf")
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def placeholder(*shape: int, dtype: torch.dtype | None = None, format: str = "plain") -> Weight:
    """A weight of this shape for samples; its values are drawn at random."""
    return Weight((), tuple(shape), dtype, format)
