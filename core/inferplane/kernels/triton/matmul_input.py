"""The left operand of a matrix product: activations, plain or quantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferplane.kernels.triton.weight_packing import FP8, INT8, PLAIN

QUANTIZED_IN_KERNEL = 4
"""A_KIND of plain activations that the product quantizes to FP8."""


@dataclass(frozen=True)
class MatmulInput:
    """The left operand of a product, `[M, K]` with contiguous rows: plain, or quantized with float32 scales.

    Args:
        data: the entries; FP8 as its bits (uint8).
        scale: `[M, groups]`, or `[1]` for all rows; None for plain entries.
        group: columns that share a scale, 0 for the whole row.
        dtype: the dtype of the activations before they were quantized.
        quantize: the product quantizes these plain entries to FP8 as it reads them: by `scale` if there is one, else
            with a scale per loop iteration's columns.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    group: int
    dtype: torch.dtype
    quantize: bool = False

    @property
    def row_scales(self) -> int:
        """Number of scales per row; 0 where one scale holds for all rows (a static scale)."""
        return 1 if self.scale is None else self.scale.shape[-1] if self.scale.ndim == 2 else 0

    @property
    def kind(self) -> int:
        """The form of the entries, A_KIND of the kernels: PLAIN, FP8, INT8 or QUANTIZED_IN_KERNEL."""
        if self.quantize:
            return QUANTIZED_IN_KERNEL
        return PLAIN if self.scale is None else FP8 if self.data.dtype == torch.uint8 else INT8


def make_plain_input(x: torch.Tensor) -> MatmulInput:
    """Rows `[M, K]` as the left operand of a product, not quantized; copied if they are not contiguous."""
    return MatmulInput(x if x.stride(-1) == 1 and x.is_contiguous() else x.contiguous(), None, 0, x.dtype)


def make_quantized_input(data: torch.Tensor, scale: torch.Tensor, group: int, dtype: torch.dtype) -> MatmulInput:
    """Values `[M, K]` and scales, as the op `quantize` returns them, as the left operand of a product; not copied.
    `group` columns share a scale (0: the whole row), `dtype` is that before quantizing, and of the product's result.
    """
    return MatmulInput(data.view(torch.uint8) if data.dtype == torch.float8_e4m3fn else data, scale, group, dtype)
