"""Orthogonal matrices that spread outlier channels over all channels, and a checkpoint whose weights are rotated.

Source: QuaRot, Ashkboos et al., arXiv 2404.00456; randomized Hadamard matrices as in QuIP#, arXiv 2402.04396.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from inferplane.binding import TensorSource
from inferplane.errors import CheckpointError
from inferplane.ops import make_hadamard, rotate_blocks
from inferplane.types import Shard

LARGEST_FACTOR = 128
"""Most rows of a Hadamard matrix that is multiplied as one; larger ones are products of such."""


class Rotation:
    """An orthogonal matrix Q of `size` rows: seeded signs, then a Hadamard matrix of the largest power of two that
    divides the size, times (Kronecker) a seeded orthogonal matrix of the odd rest.

    Args:
        size: number of channels.
        seed: of the signs and of the odd factor. None: no signs, and nothing random where the size is a power of two.
    """

    def __init__(self, size: int, seed: int | None = None) -> None:
        self.size, self.seed = size, seed
        self.power = size & -size
        draw = torch.Generator().manual_seed(0 if seed is None else seed)
        signs = torch.ones(size) if seed is None else torch.randint(0, 2, (size,), generator=draw).float() * 2 - 1
        self._signs = signs
        odd = size // self.power
        drawn = torch.randn(odd, odd, generator=draw, dtype=torch.float64)
        self._odd = torch.linalg.qr(drawn)[0].float() if odd > 1 else None
        self._factors = []
        rest = self.power
        while rest > 1:
            factor = min(rest, LARGEST_FACTOR)
            self._factors.append(make_hadamard(factor).float())
            rest //= factor

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """`x Q` for x `[..., size]`, in float32."""
        y = (x.float() * self._signs).reshape(-1, self.size)
        inner = 1
        for factor in self._factors:
            y = (factor @ y.reshape(-1, len(factor), inner)).reshape(-1, self.size)
            inner *= len(factor)
        if self._odd is not None:
            y = (self._odd.T @ y.reshape(-1, len(self._odd), self.power)).reshape(-1, self.size)
        return y.reshape(x.shape)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """`Q^T x` for x `[size, ...]`, in float32."""
        return self.columns(x.reshape(self.size, -1).T).T.reshape(x.shape).contiguous()


@dataclass(frozen=True)
class Rotated:
    """How a tensor is read anew.

    Args:
        gain: columns are multiplied by this first, `[K]`: what a norm in front of them would do.
        columns: columns are rotated. rows: rows are.
        head_rows: rows are rotated, those of each head apart. head_columns: columns, those of each head apart.
        block: so many columns are multiplied by a Hadamard matrix, as `rotated_activation` does; 0: none.
        ones: what each entry becomes, whatever it was: a norm whose gain the readers have; None: nothing of the kind.
    """

    gain: torch.Tensor | None = None
    columns: Rotation | None = None
    rows: Rotation | None = None
    head_rows: Rotation | None = None
    head_columns: Rotation | None = None
    block: int = 0
    ones: float | None = None

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        """The new values of a tensor, `[N, K]` or `[N]`, in float32."""
        value = value.float()
        if self.ones is not None:
            return torch.full_like(value, self.ones)
        if self.gain is not None:
            value = value * self.gain
        if self.columns is not None:
            value = self.columns.columns(value)
        if self.head_columns is not None:
            value = self.head_columns.columns(value.unflatten(-1, (-1, self.head_columns.size))).flatten(-2)
        if self.block:
            value = rotate_blocks(value, self.block)
        if self.head_rows is not None:
            heads = value.unflatten(0, (-1, self.head_rows.size)).transpose(0, 1)
            value = self.head_rows.rows(heads).transpose(0, 1).flatten(0, 1)
        if self.rows is not None:
            value = self.rows.rows(value)
        return value


@dataclass(frozen=True)
class RotatedSource:
    """A checkpoint whose tensors are rotated while they are read, as a `TensorSource`.

    Args:
        source: the tensors as they are, none of them quantized.
        changes: by tensor. aliases: a tensor that is not stored -> the stored one that it is made of.
    """

    source: TensorSource
    changes: Mapping[str, Rotated]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> Iterable[str]:
        """See `TensorSource.names`."""
        stored = list(self.source.names())
        return [*stored, *(name for name in self.aliases if name not in stored)]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource.shape`."""
        return self.source.shape(self.aliases.get(name, name))

    def dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource.dtype`."""
        return self.source.dtype(self.aliases.get(name, name))

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """See `TensorSource.read_into`; a tensor that changes is read as a whole, in float32."""
        stored, change = self.aliases.get(name, name), self.changes.get(name)
        if change is None:
            self.source.read_into(stored, out, shard)
            return
        shape = self.shape(name)
        if shape is None:
            raise CheckpointError(f"The checkpoint has no tensor {name}.", remedy="fetch the files again")
        whole = torch.empty(shape, dtype=torch.float32)
        self.source.read_into(stored, whole, Shard())
        value = change.apply(whole)
        if not shard.is_whole:
            first, last = shard.bounds(value.shape[shard.axis])
            value = value.narrow(shard.axis, first, last - first)
        out.copy_(value)
