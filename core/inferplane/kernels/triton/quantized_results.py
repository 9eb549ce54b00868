"""Quantized forms of results: what a norm's kernel leaves for the matrix product that reads the norm.

An op such as `add_rms_norm` returns the plain tensor, whatever reads it. Where the checkpoint asks the readers to
quantize it, the norm's kernel quantizes the row while it is in registers and keeps the quantized form here. A product
that wants that very form finds it and saves a launch; every other reader uses the plain tensor and loses nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class QuantizedActivation(NamedTuple):
    """What the op `quantize` makes of a tensor `[T, K]`, made ahead by the kernel that computed the tensor.

    Args:
        format: "fp8" or "int8".
        group: columns that share a scale; 0: the whole row.
        values: `[T, K]`, float8_e4m3fn or int8.
        scales: float32 `[T, groups]`.
    """

    format: str
    group: int
    values: torch.Tensor
    scales: torch.Tensor


_quantized = WeakTensorKeyDictionary()
"""Quantized forms by the tensor object. An entry dies with its tensor, so it can never be found for another one that
takes the same memory; and it cannot become wrong, since no kernel writes into what it is given."""


def keep_quantized(x: torch.Tensor, quantized: QuantizedActivation) -> None:
    """Remember the quantized form of the tensor `x`, for `find_quantized`, while the object `x` lives; views and copies
    of `x` have none.
    """
    _quantized[x] = quantized


def find_quantized(x: torch.Tensor, format: str, group: int) -> QuantizedActivation | None:
    """The quantized form of `x`, if the kernel that computed `x` left one in this format with `group` columns per
    scale; else None, and the caller quantizes.
    """
    found: QuantizedActivation | None = _quantized.get(x)
    return found if found is not None and (found.format, found.group) == (format, group) else None
