"""Weights and rotary tables in the layouts that several vendors' operators read."""

from __future__ import annotations

import torch

from inferplane.plugin import PackedStorage, Packing, QTensor
from inferplane.renamed import old_attributes

INT4_GROUPS = {"int4_group": 128, "int4_group64": 64, "int4_group32": 32}
"""INT4 formats with groups -> columns that share a scale."""

FLOAT32 = Packing("float32", lambda w: w.float(), storage=PackedStorage.of_tensors("1"))
"""For operators that take norms' weights and experts' biases in float32 whatever the dtype of activations."""


@old_attributes({"in_dtype": "to_dtype"})
class RopeTable:
    """A rotary table `[positions, D]`, cosines before sines, in the dtype of the queries, which operators expect.

    Args:
        table: cosines and sines `[positions, 2, D / 2]`.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table.flatten(1).contiguous()
        self._cast: dict[torch.dtype, torch.Tensor] = {}

    def to_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        """The table `[positions, D]` in a dtype, that of the queries; the first call per dtype makes a copy, which
        stays.
        """
        if dtype not in self._cast:
            self._cast[dtype] = self.table.to(dtype)
        return self._cast[dtype]


@old_attributes({"shifted": "subtract_zero_points"})
class Int8Rows:
    """An int8 weight for products that know no zero points: `data` `[N, K]` and `scale` `[N]`.

    A zero point z of row n takes `scale[n] z sum(x)` off its product; `shift` `[N]` holds `scale z`, or is None.
    """

    def __init__(self, weight: QTensor) -> None:
        self.data, self.scale = weight.data.contiguous(), weight.scale[:, 0].contiguous()
        self.shift = None if weight.zero is None else self.scale * weight.zero[:, 0]

    def subtract_zero_points(self, y: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Correct a product for the zero points that it left out; returns `y` itself if the weight has none.

        Args:
            y: the product `[T, N]`, with all scales applied.
            x: its activations `[T, K]`.
            scale: `[T, 1]`, the scales of `x` if it is quantized.
        """
        if self.shift is None:
            return y
        sums = x.float().sum(-1, keepdim=True)
        return (y.float() - (sums if scale is None else sums * scale) * self.shift).to(y.dtype)
