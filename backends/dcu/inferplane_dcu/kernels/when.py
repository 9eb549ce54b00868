"""When the vendor's functions may be used, and what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inferplane.kernels.fused.needs import declare_fused
from inferplane.plugin import Kernels
from inferplane_dcu.vendor import VendorFunction, find_once


def declare(
    kernels: Kernels, op: str, *functions: VendorFunction, needs: tuple[Any, ...] = (), **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `declare_fused`, for a kernel that calls these functions: they must be here, and are looked up at link."""
    features = (*(f.feature for f in functions), *options.pop("features", ()))
    prepare = find_once(*functions) if functions else None
    return declare_fused(kernels, op, *needs, features=features, **{"prepare": prepare, **options})


def only(result: Any) -> torch.Tensor:
    """The output of a function that may give the mass of the softmax (LSE) beside it: releases and paths differ."""
    return result[0] if isinstance(result, (tuple, list)) else result
