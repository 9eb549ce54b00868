"""How far the inputs and results of two calls are from each other."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from inferplane.audit.sites import LAYERS
from inferplane.ops import CausalLM, Op
from inferplane.types import HOST, Batch


class _Routed(NamedTuple):
    """The weights and ids of the experts of each token, `[T, k]` each, whose order within a token is free."""

    weights: torch.Tensor
    ids: torch.Tensor

    def as_matrix(self, experts: int) -> torch.Tensor:
        """The weight of each expert, float32 `[T, experts]`."""
        ids = self.ids.to(HOST).long().clamp_min(0)
        return torch.zeros(len(ids), experts).scatter_add_(1, ids, self.weights.to(HOST).float())


_Value = torch.Tensor | _Routed
LEAST_COLUMNS = 16


@dataclass
class _RowSums:
    """Sums of squares over the rows of one tensor: of differences, of reference values, and of the relative errors of
    rows, of which `rows` count. Rows of few columns may be near 0 by chance, so their relative errors do not count, but
    that of all rows does."""

    difference: float = 0.0
    reference: float = 0.0
    relative: float = 0.0
    rows: float = 0.0

    def add(self, got: torch.Tensor, reference: torch.Tensor) -> None:
        """Count the rows of a tensor."""
        if got.device != reference.device:
            got, reference = got.to(HOST), reference.to(HOST)
        want = reference.float()
        rows = (torch.linalg.vector_norm(each.flatten(1), dim=1).to(HOST) for each in (got.float() - want, want))
        different, size = (norms.double().square() for norms in rows)
        self.difference += different.sum().item()
        self.reference += size.sum().item()
        if want[0].numel() < LEAST_COLUMNS:
            self.relative, self.rows = self.difference, self.reference
            return
        some = size > 0
        self.relative += (different[some] / size[some]).sum().item()
        self.rows += int(some.sum())


@dataclass
class Difference:
    """Relative errors, summed over calls. Of several tensors they are the largest."""

    _sums: list[_RowSums] = field(default_factory=list)

    def add(self, got: Sequence[_Value], reference: Sequence[_Value]) -> None:
        """Count the tensors of a call."""
        for i, (mine, theirs) in enumerate(zip(got, reference, strict=True)):
            if i == len(self._sums):
                self._sums.append(_RowSums())
            if isinstance(mine, _Routed) and isinstance(theirs, _Routed):
                experts = 1 + int(max(mine.ids.to(HOST).max(), theirs.ids.to(HOST).max()))
                mine, theirs = mine.as_matrix(experts), theirs.as_matrix(experts)
            assert isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)
            self._sums[i].add(mine, theirs)

    @property
    def error(self) -> float:
        """The rms of the differences over the rms of the reference's values; infinite where a value is NaN or infinite,
        or differs where all of the reference are 0."""
        return max((_divide(each.difference, each.reference) for each in self._sums), default=0.0)

    @property
    def error_by_token(self) -> float:
        """The rms over tokens of each one's relative error, so that a token with large values does not hide the others;
        tokens whose reference is 0 are left out. Of results of few columns it is `error`."""
        return max((_divide(each.relative, each.rows) for each in self._sums), default=0.0)


def _divide(difference: float, reference: float) -> float:
    if not (math.isfinite(difference) and math.isfinite(reference)):
        return math.inf
    if not difference:
        return 0.0
    return math.sqrt(difference / reference) if reference else math.inf


def list_inputs(op: Op, arguments: Sequence[Any]) -> list[_Value]:
    """The activations that an op reads. Where it reads x and residual it is their sum, the hidden state."""
    names = _parameters(type(op))
    if "residual" in names:
        at = names.index("residual")
        return [_sum_hidden(arguments[0], arguments[at])]
    return _list_activations(arguments)


def list_results(op: Op, results: Sequence[Any]) -> list[_Value]:
    """The activations that an op returns. Of a layer it is the sum of x and residual; of a model, the logits."""
    if isinstance(op, LAYERS):
        return [_sum_hidden(*results)]
    return [results[0]] if isinstance(op, CausalLM) else _list_activations(results)


def _list_activations(values: Sequence[Any]) -> list[_Value]:
    """Tensors of numbers with a row for each token; states of the one sequence have one row."""
    found: list[_Value] = []
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.shape[:1] == (1,):
            continue
        after = values[i + 1] if i + 1 < len(values) else None
        if isinstance(after, torch.Tensor) and not after.is_floating_point() and after.shape == value.shape:
            found.append(_Routed(value, after))
        else:
            found.append(value)
    return found


def _sum_hidden(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return x if residual is None else x.float() + residual.float()


def _parameters(op: type[Op]) -> tuple[str, ...]:
    return tuple(inspect.signature(op.__call__).parameters)[1:]


def reads_a_cache(arguments: Sequence[Any]) -> bool:
    """Whether a call has what a layer stores of tokens or sequences among its arguments."""
    plain = torch.Tensor, Batch, int, float, str, type(None)
    return not all(isinstance(each, plain) for each in arguments)


MIXERS = (
    *("has_grouped_queries", "has_latent_attention", "has_sparse_attention", "has_compressed_attention"),
    *("has_shared_kv", "has_recurrence"),
)
"""Class attributes of blocks that mix tokens."""


def mixes_alone(op: Op) -> bool:
    """Whether an op that is called with a cache writes all that it reads of it in a step over a whole prompt: a mixer,
    or what is around it."""
    return any(getattr(below, meaning) for _, below in op.sites() for meaning in MIXERS)


def pass_inputs(own: Sequence[Any], reference: Sequence[Any]) -> list[Any]:
    """The arguments of a call with the reference's activations.

    Args:
        own: those of the model's own call, which has the step, the cache and the states, and says where tensors lie and
            in which dtype.
        reference: those of the reference's call.
    """

    def choose(mine: Any, theirs: Any) -> Any:
        if not isinstance(mine, torch.Tensor):
            return mine
        if not isinstance(theirs, torch.Tensor) or mine.shape[:1] == (1,):
            return mine.clone()
        return theirs.to(mine.device, mine.dtype, copy=True)

    return [choose(mine, theirs) for mine, theirs in zip(own, reference, strict=True)]
