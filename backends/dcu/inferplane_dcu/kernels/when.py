"""When the vendor's functions may be used, and what they give."""

from __future__ import annotations

from typing import Any

import torch

from inferplane.kernels.fused.needs import HALF
from inferplane.plugin import When
from inferplane_dcu.vendor import VendorFunction


def with_(*functions: VendorFunction, features: tuple[str, ...] = (), **more: Any) -> When:
    """16-bit floats, where these functions and features are here."""
    return When(HALF, features=(*(f.feature for f in functions), *features), **more)


def only(result: Any) -> torch.Tensor:
    """The output of a function that may give the mass of the softmax (LSE) beside it: releases and paths differ."""
    return result[0] if isinstance(result, (tuple, list)) else result
