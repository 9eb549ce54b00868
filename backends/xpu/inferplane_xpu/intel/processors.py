"""intel_extension_for_pytorch's norms on processors, where its last release for them and torch 2.8 are installed.

They rank behind the kernels that device has of its own: they are there to be pinned and compared.

Source: schemas of torch_ipex::rmsnorm and add_rmsnorm as the dispatcher states them with the wheel 2.8.0 on torch
2.8.0, where both were run against a reference.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.needs import ADD_NORM_WEIGHT, FLOATS, NORM_WEIGHT, declare_fused
from inferplane.plugin import Kernel, Kernels
from inferplane_xpu.intel import ipex
from inferplane_xpu.intel.kernels.when import RANK_LEGACY

torch_ipex = torch.ops.torch_ipex
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="ipex", dtypes=FLOATS, rank=RANK_LEGACY, capture_safe=False)


def kernels() -> list[Kernel]:
    """Both, when the extension can be used; else none, and nothing is imported."""
    if not ipex.usable(ipex.LAST_FOR_PROCESSORS).present:
        return []
    importlib.import_module(ipex.MODULE)
    return list(KERNELS)


@fused("rms_norm", NORM_WEIGHT)
def rms_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """torch_ipex::rmsnorm."""
    out: torch.Tensor = torch_ipex.rmsnorm(x.contiguous(), view.weight, view.eps)
    return out


@fused("add_rms_norm", ADD_NORM_WEIGHT)
def add_rms_norm(view: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """torch_ipex::add_rmsnorm, whose second argument becomes the sum; the first layer has no sum."""
    if residual is None:
        return rms_norm(view.norm, x), x
    total = residual.clone(memory_format=torch.contiguous_format)
    return torch_ipex.add_rmsnorm(x.contiguous(), total, view.norm.weight, view.norm.eps, True), total
