"""What an op is: a small frozen class whose fields are known before the first token and whose body is its meaning.

One body serves twice. As *oracle* it runs on float32 inputs with children that are oracles too, and judges kernels.
*Bound*, it executes: the names it reads from `self` are then a backend's kernels, or decompositions, or references.
What a body calls are its fields, so the body is the decomposition and the field path is the site's name. No tensor is
needed to build a tree of ops, and nothing is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import dataclass_transform

from inferplane.errors import UsageError
from inferplane.types import PLAIN, STATIC, KVRequest, QTensor, StepKind, Weight

if TYPE_CHECKING:
    from inferplane.ops.draw import Draw

OPS: dict[str, type[Op]] = {}
"""Every op by name."""

EXACT = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}
"""Tolerance of ops that move values without arithmetic."""
ROUNDED = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Tolerance of ops with one rounding of the result."""
ACCUMULATED = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Tolerance of ops with long sums, or with a few roundings on the way."""
BLOCK = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Tolerance of blocks, whose children each round their result."""


@dataclass(frozen=True)
class Workload:
    """How much work a step brings to an op.

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
    """What an op must at least move and compute: bytes of weights, cache and activations, and floating operations."""

    nbytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.nbytes + other.nbytes, self.flops + other.flops)


@dataclass(frozen=True)
class Sample:
    """One case an op is judged on.

    Args:
        label: short name, unique within the op, used in tests, tables and xfails.
        op: the op with its sizes; its weights are drawn at random.
        inputs: draws the arguments of `__call__`.
        step_kind: the kind of step it stands for.
    """

    label: str
    op: Op
    inputs: Callable[[Draw], tuple[Any, ...]]
    step_kind: StepKind = "mixed"


@dataclass(frozen=True)
class Comparison:
    """Outcome of holding a kernel's result against the oracle's: the worst error and where it stood."""

    error: float
    detail: str = ""


@dataclass_transform(frozen_default=True, eq_default=False)
class Op:
    """Root of every op. Subclass with `name=`; annotate fields; write `__call__(self, activations...)`.

    Fields may be weights, numbers, strings, dtypes, `KVRequest`s, child ops (or None), and tuples of child ops. Class
    attributes: `name`; `hot` (its speed decides the model's speed: it sets a decomposition's rank, and a reference
    there is warned about); `body_reads_quantized` (its body takes quantized weights as they are; else they are expanded for
    it); `tolerance` (largest accepted error by dtype, as defined by `compare`); `variants` (other
    bodies with the same meaning, chosen by a pin).
    """

    name: ClassVar[str] = "op"
    hot: ClassVar[bool] = False
    body_reads_quantized: ClassVar[bool] = True
    tolerance: ClassVar[Mapping[torch.dtype, float]] = ACCUMULATED
    variants: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, *, name: str, hot: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        if name in OPS:
            raise UsageError(f"An op named {name!r} exists already: {OPS[name].__module__}.{OPS[name].__qualname__}.")
        cls.name, cls.hot = name, hot
        dataclass(frozen=True, eq=False)(cls)
        cls._fields = tuple(f.name for f in dataclasses.fields(cls))  # type: ignore[arg-type]
        OPS[name] = cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The op's meaning, in plain torch."""
        raise NotImplementedError(type(self).__name__)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Cases that every kernel of this op is judged on; the smallest first (the start-up canary takes it)."""
        raise NotImplementedError(cls.__name__)

    def cost(self, load: Workload) -> Cost:
        """Bytes and operations of one call, children included. Default: the sum over the children."""
        total = Cost()
        for _, child in self.children():
            total = total + child.cost(load)
        return total

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """Worst error over the results: largest absolute difference divided by the largest absolute wanted value.

        Args:
            got: a kernel's result, moved to the host.
            want: the oracle's, float32.
        """
        gots, wants = as_tuple(got), as_tuple(want)
        if len(gots) != len(wants):
            return Comparison(float("inf"), f"{len(gots)} results instead of {len(wants)}")
        worst = Comparison(0.0)
        for i, (g, w) in enumerate(zip(gots, wants)):
            error = relative_error(g, w)
            if not error <= worst.error:
                worst = Comparison(error, f"result {i}" if len(wants) > 1 else "")
        return worst

    # -- structure

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Names of the fields, in order."""
        return cls._fields

    def items(self) -> Iterator[tuple[str, Any]]:
        """`(path, value)` of each field; tuples of ops are opened: `("layers.3", DecoderLayer)`."""
        for name in self._fields:
            value = getattr(self, name)
            if isinstance(value, tuple) and value and isinstance(value[0], Op):
                for i, op in enumerate(value):
                    yield f"{name}.{i}", op
            else:
                yield name, value

    def children(self) -> Iterator[tuple[str, Op]]:
        """`(path, child op)` of each field that is one."""
        for path, value in self.items():
            if isinstance(value, Op):
                yield path, value

    def weights(self, prefix: str = "") -> Iterator[tuple[str, Weight]]:
        """`(path, weight)` of this op and everything below, in order; a shared weight appears at each use."""
        for path, value in self.items():
            if isinstance(value, Weight):
                yield prefix + path, value
            elif isinstance(value, Op):
                yield from value.weights(f"{prefix}{path}.")

    def sites(self, prefix: str = "") -> Iterator[tuple[str, Op]]:
        """`(site, op)` of this op and everything below; the root's site is ""."""
        yield prefix.rstrip("."), self
        for path, child in self.children():
            yield from child.sites(f"{prefix}{path}.")

    def kv_requests(self) -> tuple[KVRequest, ...]:
        """The distinct cache requests of this op and everything below, in order."""
        found = self.__dict__.get("_kv_requests")
        if found is None:
            seen: dict[KVRequest, None] = {}
            for _, value in self.items():
                if isinstance(value, KVRequest):
                    seen[value] = None
                elif isinstance(value, Op):
                    seen.update(dict.fromkeys(value.kv_requests()))
            found = self.__dict__["_kv_requests"] = tuple(seen)
        return found

    def formats(self) -> frozenset[str]:
        """Weight formats of this op and everything below."""
        found = self.__dict__.get("_formats")
        if found is None:
            own = {v.format for _, v in self.items() if isinstance(v, Weight)}
            found = self.__dict__["_formats"] = frozenset(own.union(*(c.formats() for _, c in self.children())))
        return found

    def activation_quants(self) -> frozenset[str]:
        """How the checkpoint has activations coded for the quantized weights of this op and below; "" stands for
        weights that meet them as they are."""
        found = self.__dict__.get("_acts")
        if found is None:
            found = frozenset(w.act.removesuffix(STATIC) for _, w in self.weights() if w.format != PLAIN)
            self.__dict__["_acts"] = found
        return found

    def key(self) -> tuple[Any, ...]:
        """Static signature: ops with equal keys bind alike, whatever the layer. Computed once."""
        found = self.__dict__.get("_key")
        if found is None:
            values = (v.key() if isinstance(v, (Op, Weight)) else v for _, v in self.items())
            found = self.__dict__["_key"] = Key((self.name, *values))
        return found


class Key(tuple[Any, ...]):
    """A tuple whose hash is computed once: keys of whole models are deep, and looked up often."""

    def __hash__(self) -> int:
        try:
            return self._hash  # type: ignore[has-type]
        except AttributeError:
            self._hash = tuple.__hash__(self)
            return self._hash


def values(weight: torch.Tensor | QTensor) -> torch.Tensor:
    """A weight's values in float32, whatever its format."""
    return weight.dequantize() if isinstance(weight, QTensor) else weight.float()


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Results as a tuple, also when there is one."""
    return result if isinstance(result, tuple) else (result,)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute wanted value; infinite on other shapes, NaN or Inf."""
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
    """A weight for samples: right in shape, drawn at random."""
    return Weight((), tuple(shape), dtype, format)
