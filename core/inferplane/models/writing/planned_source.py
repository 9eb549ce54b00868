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
        self._planned, self._weights = {tensor.name: tensor for tensor in planned}, weights

    def names(self) -> Iterable[str]:
        """See `TensorSource.names`."""
        return self._planned.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource.shape`."""
        if name not in self._planned:
            return None
        found = self._planned[name].shape
        return found[::2] if CONVOLUTION.fullmatch(name) and len(found) == 3 else found

    def dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource.dtype`; None where it is not known yet."""
        return self._planned[name].dtype if name in self._planned else None

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """Only the shapes of packed weights are known."""
        out.copy_(torch.tensor(self._weights[name.removesuffix("_shape")]))


def find_published_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a tensor is published: that of a convolution has a dimension more."""
    return (shape[0], 1, shape[1]) if CONVOLUTION.fullmatch(name) and len(shape) == 2 else shape
