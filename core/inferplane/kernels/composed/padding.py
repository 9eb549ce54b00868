"""Padding rows of 16-bit matrix products, so that products have few distinct shapes.

torch and oneDNN keep what they compile for each shape of a 16-bit product for as long as the process lives: about a
megabyte for each number of rows (measured on an AMX processor: 3,200 numbers of rows, 3 GB).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def round_up_rows(count: int) -> int:
    """Round a number of rows up: to a multiple of 16; above 256 to one of eight sizes per power of two, by less than an
    eighth.
    """
    grain = max(16, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // grain) * grain


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Append rows of zeros to `x` `[rows, width]`, up to `round_up_rows(rows)`."""
    return F.pad(x, (0, 0, 0, round_up_rows(x.shape[0]) - x.shape[0]))
