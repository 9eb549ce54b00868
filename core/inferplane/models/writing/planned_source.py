"""Checks of a checkpoint that is not written yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from inferplane.models.reading.names import CONVOLUTION
from inferplane.models.writing.safetensors_writer import PlannedTensor
from inferplane.types import Shard


class PlannedSource:
    """Names and shapes of tensors that are not written yet, as a `TensorSource`.

    Args:
        planned: the tensors.
        weights: shapes of the quantized weights.
    """

    def __init__(self, planned: Iterable[PlannedTensor], weights: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes, self._weights = {tensor.name: tensor.shape for tensor in planned}, weights

    def names(self) -> Iterable[str]:
        """See `TensorSource.names`."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource.shape`."""
        found = self._shapes.get(name)
        return found[::2] if found is not None and CONVOLUTION.fullmatch(name) and len(found) == 3 else found

    def dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource.dtype`; packed integers are known by their names, and no others are known."""
        return torch.int32 if name.endswith("weight_packed") else None

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """Only the shapes of packed weights are known."""
        out.copy_(torch.tensor(self._weights[name.removesuffix("_shape")]))


def find_published_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a tensor is published: that of a convolution has a dimension more."""
    return (shape[0], 1, shape[1]) if CONVOLUTION.fullmatch(name) and len(shape) == 2 else shape
