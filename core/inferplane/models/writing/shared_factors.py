"""The factor of NVFP4's scales that weights have in common where engines join them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from inferplane.models.writing.fused_names import list_joined
from inferplane.ops.formats import find_nvfp4_factor


class SharedFactors:
    """Finds the factor of a weight's scales: engines keep one number for weights that they join, so it is theirs.

    Args:
        formats: of the quantized weights, by name.
        find_amax: a weight's name -> the largest magnitude in it, float32 of shape `[]`.
    """

    def __init__(self, formats: Mapping[str, str], find_amax: Callable[[str], torch.Tensor]) -> None:
        self._formats, self._find_amax = formats, find_amax
        self._known: dict[tuple[str, ...], torch.Tensor] = {}

    def find(self, name: str) -> torch.Tensor | None:
        """The factor for a weight; None for one in another format, or that is joined to none."""
        if self._formats[name] != "nvfp4":
            return None
        joined = tuple(n for n in list_joined(name, self._formats) if self._formats[n] == "nvfp4")
        if len(joined) < 2:
            return None
        if joined not in self._known:
            self._known[joined] = find_nvfp4_factor(torch.stack([self._find_amax(n) for n in joined]).amax())
        return self._known[joined]
