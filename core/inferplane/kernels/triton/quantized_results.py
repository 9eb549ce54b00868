"""Codes that a kernel made of its result while it was at hand, kept with the result for whoever would code it.

The codes are those that the op `quantize` makes of the same tensor, so that taking them saves a pass and changes
nothing. They go with the tensor object: a view of it, or a copy, has none.
"""

from __future__ import annotations

import torch

ATTRIBUTE = "_inferplane_codes"


def hand(x: torch.Tensor, format: str, group: int, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x` with its codes: `data` and `scale` as of `Quantize(format, group)`."""
    setattr(x, ATTRIBUTE, (format, group, data, scale))
    return x


def handed(x: torch.Tensor, format: str, group: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Data and scale of `x` in this format with as many columns a scale (0: the whole row); None: there are none."""
    found = getattr(x, ATTRIBUTE, None)
    return None if found is None or found[:2] != (format, group) else found[2:]
