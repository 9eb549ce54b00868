"""Layers that draft for a model and have weights of their own: what they share with it, and what they read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from inferplane.ops import CausalLM, Eagle3Layer, EagleLayer, HyperMTPLayer, MTPLayer, Op
from inferplane.types import Weight

AnyOp = TypeVar("AnyOp", bound=Op)
AnyMTPLayer = MTPLayer | HyperMTPLayer
AnyDraftLayer = AnyMTPLayer | EagleLayer | Eagle3Layer


@dataclass(frozen=True)
class DraftLayers:
    """Layers that draft for a model, as ops.

    Args:
        layers: the ops. Weights that they share with the model are the model's own objects.
        unread: shell patterns of tensors in their files that are expected and not read.
        copies: which of "embedding" and "head" they read from their own files; the others are the model's.
    """

    layers: tuple[AnyDraftLayer, ...]
    unread: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()

    def own_weights(self, model: Op) -> set[int]:
        """Ids of the weights that `model`, for which they draft, does not have."""
        return {id(w) for layer in self.layers for _, w in layer.weights()} - {id(w) for _, w in model.weights()}


def find_stored(model: CausalLM, names: Collection[str]) -> tuple[AnyMTPLayer, ...]:
    """The prediction layers of a model of which its files have a tensor; some configs count layers that are not there.

    Args:
        model: built with the layers.
        names: of the tensors in its files.
    """

    def is_stored(layer: AnyDraftLayer) -> bool:
        own = DraftLayers((layer,)).own_weights(replace(model, mtp=()))
        return any(part in names for _, w in layer.weights() if id(w) in own for part in w.parts)

    return tuple(layer for layer in model.mtp if isinstance(layer, (MTPLayer, HyperMTPLayer)) and is_stored(layer))


def with_drafts(model: CausalLM, layers: tuple[AnyDraftLayer, ...]) -> CausalLM:
    """The model with further layers that draft for it; one with an EAGLE-3 head computes what that reads, and one whose
    prediction layers read streams returns them."""
    every = (*model.mtp, *layers)
    found = replace(model, mtp=every, returns_streams=any(isinstance(layer, HyperMTPLayer) for layer in every))
    for layer in layers:
        if isinstance(layer, Eagle3Layer):
            found = replace(found, layers=replace(found.layers, taps=layer.taps), fuse=layer.fc)
    return found


def read_from(op: AnyOp, rename: Callable[[str], str], shared: Mapping[int, Weight] | None = None) -> AnyOp:
    """Return the tree of ops with its weights read from other names. Weights that were shared stay shared.

    Args:
        op: any.
        rename: from a tensor's name to that in the files.
        shared: by id of a weight the one that takes its place.
    """
    made: dict[int, Weight] = dict(shared or {})

    def rename_weight(weight: Weight) -> Weight:
        return made.setdefault(id(weight), replace(weight, parts=tuple(map(rename, weight.parts))))

    def visit(value: Any) -> Any:
        if isinstance(value, Weight):
            return rename_weight(value)
        if isinstance(value, tuple):
            return tuple(map(visit, value))
        if isinstance(value, Op):
            return type(value)(**{field: visit(getattr(value, field)) for field in value.fields()})
        return value

    found: AnyOp = visit(op)
    return found
