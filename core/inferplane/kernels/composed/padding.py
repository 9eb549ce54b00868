"""Shapes of products: few, whatever number of rows there is.

torch and oneDNN keep what they compile for each shape of a product in 16 bits, for as long as the process lives. Every
number of rows costs about a megabyte (measured on an AMX processor: 3,200 numbers of rows, 3 GB).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def round_up_rows(count: int) -> int:
    """A number of rows, rounded up: to multiples of 16, above 256 by less than an eighth (eight sizes an octave)."""
    grain = max(16, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // grain) * grain


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """`[rows, width]` with rows of zeros behind, up to the rounded number."""
    return F.pad(x, (0, 0, 0, round_up_rows(x.shape[0]) - x.shape[0]))
