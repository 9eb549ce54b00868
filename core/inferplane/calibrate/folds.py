"""Places where channels can be rescaled without changing what a layer computes: before some products, behind a norm, a
gate or a value.

Source: SmoothQuant, arXiv 2211.10438 (norms); AWQ, arXiv 2306.00978 (values and gates).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from inferplane.calibrate.drafting import PredictionLayer
from inferplane.calibrate.observe import NORMS, ProductKey
from inferplane.ops import Op
from inferplane.types import Weight


@dataclass(frozen=True)
class FoldedRows:
    """Rows of a weight, or entries of a bias, that make the channels.

    Args:
        weight: of two dimensions, or a stack, or a bias.
        first: the first row. expert: which of a stack, or -1.
    """

    weight: Weight
    first: int = 0
    expert: int = -1


@dataclass(frozen=True)
class Fold:
    """Channels that are divided by a scale where they are made, and multiplied by it where they are read.

    Args:
        made_by: rows that are divided.
        norm: the norm whose weight is divided; None: there is none.
        read_by: products whose columns are multiplied.
        channels: their number.
        repeats: how many times each channel is read one head after the other: query heads of a value head.
        head_dim: channels of a head, where `repeats` is more than 1.
    """

    read_by: tuple[ProductKey, ...]
    channels: int
    made_by: tuple[FoldedRows, ...] = ()
    norm: Op | None = None
    repeats: int = 1
    head_dim: int = 1

    def spread(self, scale: torch.Tensor) -> torch.Tensor:
        """From a number a channel to one a column of the products."""
        if self.repeats == 1:
            return scale
        return scale.view(-1, 1, self.head_dim).expand(-1, self.repeats, -1).flatten()

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """From a number a column to the largest of each channel."""
        return columns if self.repeats == 1 else columns.view(-1, self.repeats, self.head_dim).amax(1).flatten()


def find_folds(layer: Op | PredictionLayer, readers: Mapping[Op, Sequence[ProductKey]]) -> list[Fold]:
    """The folds of a layer: those behind norms, of which all products are known, and those within blocks.

    Args:
        layer: the layer.
        readers: a norm -> the products that read its result, as `NormReaders` found them.
    """
    found = [
        Fold(tuple(keys), norm.weight.shape[0], norm=norm) for norm, keys in readers.items() if isinstance(norm, NORMS)
    ]
    for _, op in layer.sites():
        if op.is_gated_mlp:
            found += _of_gate(op)
        elif op.has_experts:
            found += _of_experts(op)
        elif op.has_grouped_queries:
            found += _of_values(op)
    return found


def _of_gate(op: Op) -> Iterator[Fold]:
    """The product of gate and up: the rows of up are its factor."""
    up, down = op.gate_up, op.down  # type: ignore[attr-defined]
    if getattr(op.act, "limit", None) is not None:  # type: ignore[attr-defined]
        return  # which cuts the rows of up, whatever they are multiplied by
    inner = down.weight.shape[-1]
    rows = [FoldedRows(up.weight, inner)] + ([] if up.bias is None else [FoldedRows(up.bias, inner)])
    yield Fold((ProductKey(id(down.weight)),), inner, tuple(rows))


def _of_experts(op: Op) -> Iterator[Fold]:
    """The same of each expert."""
    experts = op.experts  # type: ignore[attr-defined]
    up, down = getattr(experts, "gate_up", None), getattr(experts, "down", None)
    if not (isinstance(up, Weight) and isinstance(down, Weight)):
        return
    if not set(experts.fields()) <= EXPERT_FIELDS or experts.act or experts.limit is not None:
        return
    inner = down.shape[-1]
    for e in range(down.shape[0]):
        yield Fold((ProductKey(id(down), e),), inner, (FoldedRows(up, inner, e),))


EXPERT_FIELDS = {"gate_up", "down", "partial", "act", "limit", "limits_input"}
"""Fields of experts whose meaning is known here; others, such as biases and clamps, may not allow a fold."""


def _of_values(op: Op) -> Iterator[Fold]:
    """Values, which attention only adds up."""
    (heads, groups), dim, qkv = op.heads, op.v_dim or op.head_dim, op.qkv  # type: ignore[attr-defined]
    first = qkv.weight.shape[0] - groups * dim
    rows = [FoldedRows(qkv.weight, first)] + ([] if qkv.bias is None else [FoldedRows(qkv.bias, first)])
    key = ProductKey(id(op.o.weight))  # type: ignore[attr-defined]
    yield Fold((key,), groups * dim, tuple(rows), repeats=heads // groups, head_dim=dim)


def scale_columns(values: dict[int, torch.Tensor], key: ProductKey, scale: torch.Tensor) -> None:
    """Multiply the columns of a product's weight, in place."""
    value = values[key.weight]
    (value if key.expert < 0 else value[key.expert]).mul_(scale)


def apply(fold: Fold, values: dict[int, torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
    """Fold a scale into the weights of a layer, in place.

    Args:
        fold: where.
        values: the layer's weights in float32, by id.
        scale: positive, a number a channel.

    Returns:
        The scale that was applied. Behind a norm it is the given one as the norm's own rounding to bfloat16 allows,
        so that nothing changes when its weight is stored.
    """
    if fold.norm is not None:
        scale = _divide_norm(fold.norm, values, scale)
    for rows in fold.made_by:
        value = values[id(rows.weight)]
        value = value if rows.expert < 0 else value[rows.expert]
        part = value[rows.first : rows.first + fold.channels]
        part.div_(scale[:, None] if part.ndim == 2 else scale)
    columns = fold.spread(scale)
    for key in fold.read_by:
        scale_columns(values, key, columns)
    return scale


def _divide_norm(norm: Op, values: dict[int, torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
    """Divide a norm's weight, and its bias; entries that are 0 with their offset stay as they are."""
    weight, offset = values[id(norm.weight)], float(getattr(norm, "offset", 0.0))  # type: ignore[attr-defined]
    before = weight + offset
    after = (before / scale - offset).bfloat16().float()
    held = after + offset
    applied = torch.where((held != 0) & (before != 0), before / held, torch.ones_like(scale))
    applied = torch.where((applied > 0) & applied.isfinite(), applied, torch.ones_like(scale))
    weight.copy_(torch.where(applied == 1, weight, after))
    bias = getattr(norm, "bias", None)
    if bias is not None:
        values[id(bias)].div_(applied)
    return applied
