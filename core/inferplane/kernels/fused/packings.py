"""Weights and tables as several vendors' operators read them."""

from __future__ import annotations

import torch

from inferplane.plugin import Packing, QTensor

INT4_GROUPS = {"int4_group": 128, "int4_group64": 64, "int4_group32": 32}
"""Columns that share a scale, by format."""

FLOAT32 = Packing("float32", lambda w: w.float())
"""Norms' weights and experts' biases, for operators that take them in float32 whatever the activations are in."""


class RopeTable:
    """Cosines and sines `[positions, D]`, kept in each dtype that is asked for: operators want the queries' own.

    Args:
        table: `[positions, 2, D / 2]`.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.whole = table.flatten(1).contiguous()
        self._cast: dict[torch.dtype, torch.Tensor] = {}

    def to_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        """The table in a dtype; cast once."""
        if dtype not in self._cast:
            self._cast[dtype] = self.whole.to(dtype)
        return self._cast[dtype]


class Int8Rows:
    """int8 rows `[N, K]`, their scales `[N]`, and what a zero point takes off a row's product for each unit of the
    inputs' sum, `[N]` or None: for products that know no zero points.
    """

    def __init__(self, weight: QTensor) -> None:
        self.data, self.scale = weight.data.contiguous(), weight.scale[:, 0].contiguous()
        self.shift = None if weight.zero is None else self.scale * weight.zero[:, 0]

    def subtract_zero_points(self, y: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """The product without what zero points take off.

        Args:
            y: the product `[T, N]`.
            x: its inputs `[T, K]`.
            scale: `[T, 1]`, by which quantized inputs are multiplied.
        """
        if self.shift is None:
            return y
        sums = x.float().sum(-1, keepdim=True)
        return (y.float() - (sums if scale is None else sums * scale) * self.shift).to(y.dtype)
