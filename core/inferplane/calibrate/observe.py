"""Observes the products of a layer that runs: what each weight is multiplied by, and which norm it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from inferplane.calibrate.methods.gptq import Hessian
from inferplane.ops import Op
from inferplane.ops.basic import RMSNorm
from inferplane.ops.forms.norms import LayerNorm, WidthRMSNorm
from inferplane.types import Weight

NORMS = (RMSNorm, LayerNorm, WidthRMSNorm)
SAMPLE_ROWS = 2048
"""Most rows of a product's inputs that are held for searches."""


class ProductKey(NamedTuple):
    """A weight of two dimensions, or one expert of a stack."""

    weight: int
    expert: int = -1


@dataclass
class Inputs:
    """What a weight was multiplied by.

    Args:
        columns: K.
        hessian: sums their products; None: it is not needed.
        every: one row of so many is held for `sample`.

    Attributes: `rows`, their number; `largest`, of the absolute values of each column, `[K]`.
    """

    columns: int
    hessian: Hessian | None
    every: int = 1
    rows: int = 0
    largest: torch.Tensor = field(init=False)
    total: torch.Tensor = field(init=False)
    squares: torch.Tensor = field(init=False)
    held: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.largest, self.total, self.squares = (torch.zeros(self.columns) for _ in range(3))

    def add(self, x: torch.Tensor) -> None:
        """Count rows of inputs, `[T, K]`."""
        size = x.abs()
        self.largest = torch.maximum(self.largest, size.amax(0))
        self.total += size.sum(0)
        self.squares += x.square().sum(0)
        if self.hessian is not None:
            self.hessian.add(x)
        self.held.append(x[-self.rows % self.every :: self.every].clone())
        self.rows += len(x)

    @property
    def mean(self) -> torch.Tensor:
        """Mean absolute value of each column, `[K]`."""
        return self.total / max(1, self.rows)

    @property
    def power(self) -> torch.Tensor:
        """Mean square of each column, `[K]`."""
        return self.squares / max(1, self.rows)

    @property
    def sample(self) -> torch.Tensor:
        """Rows, `[R, K]`."""
        return torch.cat(self.held)[:SAMPLE_ROWS] if self.held else torch.empty(0, self.columns)

    def include(self, other: Inputs, share: float) -> None:
        """Count another one's inputs, each with this weight."""
        self.largest = torch.maximum(self.largest, other.largest)
        self.total += other.total * share
        self.squares += other.squares * share
        if self.hessian is not None and other.hessian is not None:
            self.hessian.include(other.hessian, share)
        self.held += other.held
        self.rows += round(other.rows * share)

    def divide(self, scale: torch.Tensor) -> None:
        """Divide all columns, as if the inputs had been divided before they were counted."""
        self.largest, self.total = self.largest / scale, self.total / scale
        self.squares = self.squares / scale.square()
        self.held = [x / scale for x in self.held]
        if self.hessian is not None:
            self.hessian.divide(scale)


class ProductObserver(TorchFunctionMode):
    """While active, calls of `F.linear` with a known weight are seen.

    Args:
        values: a layer's weights in float32, by id.
        weights: those that are looked for.
        see: called with the product's key and its inputs `[T, K]`; returns what is multiplied in their place.
    """

    def __init__(
        self,
        values: Mapping[int, torch.Tensor],
        weights: Iterable[Weight],
        see: Callable[[ProductKey, torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self._see = see
        self._keys: dict[int, ProductKey] = {}
        for weight in weights:
            value = values[id(weight)]
            if value.ndim == 3:
                keys = {value[e].data_ptr(): ProductKey(id(weight), e) for e in range(len(value))}
            else:
                keys = {value.data_ptr(): ProductKey(id(weight))}
            self._keys.update(keys)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        if func is F.linear and (key := self._keys.get(args[1].data_ptr())) is not None:
            x = args[0]
            seen = self._see(key, x if x.ndim == 2 else x.reshape(-1, x.shape[-1]))
            args = (seen if x.ndim == 2 else seen.reshape(x.shape), *args[1:])
        return func(*args, **(kwargs or {}))


class NormReaders:
    """Finds which products read the result of which norm, by the identity of tensors.

    Pass `around` to the binding of a layer, run one step within `products`, and read `found`.

    Attributes: `found`, a norm -> keys of the products that read its result.
    """

    def __init__(self) -> None:
        self.found: dict[Op, list[ProductKey]] = {}
        self._results: dict[int, tuple[torch.Tensor, Op]] = {}

    def around(self, op: Op, bound: Callable[..., Any]) -> Callable[..., Any]:
        """Observe norms, and stacks of experts, which read some rows of a norm's result."""
        if isinstance(op, NORMS):

            def norm(x: torch.Tensor) -> torch.Tensor:
                y: torch.Tensor = bound(x)
                self._results[id(y)] = y, op
                return y

            return norm
        stacked = [value for name, value in op.items() if name == "gate_up" and isinstance(value, Weight)]
        if stacked:

            def experts(x: torch.Tensor, *rest: Any) -> Any:
                for e in range(stacked[0].shape[0]):
                    self.see(ProductKey(id(stacked[0]), e), x)
                return bound(x, *rest)

            return experts
        return bound

    def see(self, key: ProductKey, x: torch.Tensor) -> torch.Tensor:
        """Take note of a product."""
        known = self._results.get(id(x))
        if known is not None and key not in (readers := self.found.setdefault(known[1], [])):
            readers.append(key)
        return x
