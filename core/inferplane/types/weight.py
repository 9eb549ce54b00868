"""Weights as a model declares them, before any tensor exists, and packings as kernels want them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from inferplane.types.placement import WHOLE, Shard

PLAIN = "plain"
STATIC = "_static"
"""Ends `Weight.act` where calibration has found the activations' scale."""


@dataclass(frozen=True, eq=False)
class Weight:
    """One weight of a model: which checkpoint tensors it is made of and what it looks like.

    Identity is the tie: an embedding and an output head that share one `Weight` object share one tensor. Rows are
    outputs. `parts` are concatenated along rows in the order given; for a stack of experts the parts fill
    `shape[0]` slices one after the other. Nothing here is a tensor, so a model of any size can be declared at once.

    Args:
        parts: checkpoint names, in order; empty with `make`.
        shape: shape on this rank, `[N, K]`, `[N]`, or `[E, N, K]` for stacked experts.
        dtype: dtype of the values as kernels see them; None follows the plan's dtype.
        format: quantized format of the checkpoint's tensors ("plain", or a registered format such as "fp8_block").
        make: builds a constant (a rope table) instead of reading one; called once at load.
        shard: the slice of each part that this rank reads; a tuple where parts are cut differently.
        optional: the checkpoint may lack it; `default` is then used.
        default: builds the value when an optional weight is missing.
        rows: of each part on this rank; empty: only their sum is held against the shape.
        act: how the checkpoint has the activations coded that meet this weight ("fp8"; "fp8_static" with the scale that
            it brings, `QTensor.act_scale`); empty: as they are. Kernels may then do so; none has to.
    """

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    format: str = PLAIN
    make: Callable[[], torch.Tensor] | None = None
    shard: Shard | tuple[Shard, ...] = WHOLE
    optional: bool = False
    default: Callable[[], torch.Tensor] | None = None
    rows: tuple[int, ...] = ()
    act: str = ""

    def shard_of(self, part: int) -> Shard:
        """The slice of one part."""
        return self.shard[part] if isinstance(self.shard, tuple) else self.shard

    def key(self) -> tuple[Any, ...]:
        """The static signature: equal keys bind to the same kernel, whatever the layer."""
        return ("weight", self.shape, self.dtype, self.format, *((self.act,) if self.act else ()))

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of the values in one packing, when the plan's dtype is `dtype`; quantized formats count a byte."""
        size = 1 if self.format != PLAIN else (self.dtype or dtype).itemsize
        return math.prod(self.shape) * size


def _same(tensor: Any) -> Any:
    return tensor


@dataclass(frozen=True)
class Packing:
    """A named weight layout. Equal names share one packed copy, whoever asked for it.

    Args:
        name: unique; by habit `provider.layout` ("acme.tiled").
        fn: canonical tensor or `QTensor` -> what the kernel reads. Pure; may return any object that holds tensors.
        dense: entries of fewer than 8 bits share bytes; canonically each has a byte of its own.
    """

    name: str
    fn: Callable[[Any], Any] = field(default=_same, compare=False)
    dense: bool = field(default=False, compare=False)


CANONICAL = Packing("canonical")
