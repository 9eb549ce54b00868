"""Places where channels can be shifted without changing what a layer computes: behind a layer norm with a bias, where
every product that reads it has a bias too.

Source: Outlier Suppression+, arXiv 2304.09145.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from inferplane.calibrate.drafting import PredictionLayer
from inferplane.calibrate.observe import NORMS, ProductKey
from inferplane.errors import UnsupportedModelError
from inferplane.ops import LayerNorm, Op
from inferplane.types import Weight


@dataclass(frozen=True)
class ChannelShift:
    """A norm that subtracts a number from each channel, which the products behind it add again.

    Args:
        norm: the norm, with a bias.
        read_by: all products that read its result, with their biases.
    """

    norm: LayerNorm
    read_by: tuple[tuple[ProductKey, Weight], ...]

    def weights(self) -> Iterator[Weight]:
        """The biases that change."""
        assert self.norm.bias is not None
        yield self.norm.bias
        for _, bias in self.read_by:
            yield bias


def find_shifts(layer: Op | PredictionLayer, readers: Mapping[Op, Sequence[ProductKey]]) -> list[ChannelShift]:
    """The norms of a layer behind which channels can be shifted.

    Args:
        layer: the layer.
        readers: a norm -> the products that read its result, as `NormReaders` found them.
    """
    biases = _list_biases(layer)
    return [
        ChannelShift(norm, tuple((key, biases[key.weight]) for key in keys))
        for norm, keys in readers.items()
        if isinstance(norm, LayerNorm) and norm.bias is not None and all(key.weight in biases for key in keys)
    ]


def check_shifts(name: str, layers: Iterable[Op]) -> None:
    """Raise UnsupportedModelError if no layer of a model has both a norm and products with biases.

    Args:
        name: of the model.
        layers: its layers.
    """
    for layer in layers:
        norms = [op for _, op in layer.sites() if isinstance(op, LayerNorm) and op.bias is not None]
        widths = {norm.weight.shape[-1] for norm in norms}
        if any(w.shape[-1] in widths for _, w in layer.weights() if id(w) in _list_biases(layer)):
            return
    raise UnsupportedModelError(
        f"{name} cannot be shifted: the bias of a norm subtracts a shift and the bias of each product behind it adds "
        "it again, and its norms (RMS norms have none) or these products have no bias.",
        there_is="smoothquant and pss, which rescale channels, and behind RMS norms rotate, which spreads outliers",
        remedy="take one of these in its place, such as --method smoothquant,gptq",
    )


def _list_biases(layer: Op | PredictionLayer) -> dict[int, Weight]:
    """Id of a weight of two dimensions -> the bias that is added to its product."""
    found = {}
    for _, op in layer.sites():
        weight, bias = getattr(op, "weight", None), getattr(op, "bias", None)
        if isinstance(weight, Weight) and isinstance(bias, Weight) and not isinstance(op, NORMS):
            found[id(weight)] = bias
    return found


@dataclass
class NormRanges:
    """Observes the smallest and the largest of each channel that norms return. Pass `around` to the binding of a layer.

    Args:
        norms: those that are observed.

    Attributes: `least` and `largest`, a norm -> `[C]` for each run of it.
    """

    norms: Collection[Op]
    least: dict[Op, list[torch.Tensor]] = field(default_factory=dict)
    largest: dict[Op, list[torch.Tensor]] = field(default_factory=dict)

    def around(self, op: Op, bound: Callable[..., Any]) -> Callable[..., Any]:
        """Observe a norm."""
        if op not in self.norms:
            return bound

        def norm(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = bound(x)
            rows = y.reshape(-1, y.shape[-1])
            self.least.setdefault(op, []).append(rows.amin(0))
            self.largest.setdefault(op, []).append(rows.amax(0))
            return y

        return norm


def apply(shift: ChannelShift, values: Mapping[int, torch.Tensor], z: torch.Tensor) -> torch.Tensor:
    """Shift channels, in place.

    Args:
        shift: where.
        values: the layer's weights in float32, by id.
        z: what is subtracted from each channel, `[C]`.

    Returns:
        What was subtracted: z as the norm's own rounding to bfloat16 allows, so that what is stored is given back.
    """
    bias = values[id(shift.norm.bias)]
    after = (bias - z).bfloat16().float()
    applied = bias - after
    bias.copy_(after)
    for key, added in shift.read_by:
        values[id(added)].add_(values[key.weight] @ applied)
    return applied
