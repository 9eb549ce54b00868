"""Norms, rotary positions and activation: vLLM's operators as vllm-xpu-kernels has them.

Source: vllm-project/vllm-xpu-kernels at 4543b580, csrc/layernorm.cpp, pos_encoding_kernels.cpp and activation.cpp;
schemas as in its wheel 0.1.16.2.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.kernels.fused import forms
from inferplane.kernels.fused.needs import ADD_NORM_WEIGHT, FLOATS, NORM_WEIGHT, RANK_FUSED
from inferplane.kernels.fused.packings import RopeTable
from inferplane.plugin import Kernels, Packing, When
from inferplane_xpu.intel.kernels.when import OPERATORS

vllm = torch.ops._C
KERNELS = Kernels()


TABLE = Packing("vllm_xpu.rope_table", RopeTable)


@KERNELS(
    "rms_norm",
    "vllm_xpu",
    rank=RANK_FUSED,
    when=When(FLOATS, features=OPERATORS, needs=(NORM_WEIGHT,)),
    capture_safe=True,
)
def rms_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """_C::rms_norm of contiguous rows."""
    return forms.rms_norm(vllm.rms_norm, view, x)


@KERNELS(
    "add_rms_norm",
    "vllm_xpu",
    rank=RANK_FUSED,
    when=When(FLOATS, features=OPERATORS, needs=(ADD_NORM_WEIGHT,)),
    capture_safe=True,
)
def add_rms_norm(view: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """_C::fused_add_rms_norm, whose first argument becomes the norm and second the sum; the first layer has no sum."""
    if residual is None:
        return rms_norm(view.norm, x), x
    return forms.add_rms_norm(vllm.fused_add_rms_norm, view.norm, x, residual)


@KERNELS(
    "rope",
    "vllm_xpu",
    rank=RANK_FUSED,
    when=When(FLOATS, features=OPERATORS),
    packs={"table": TABLE},
    capture_safe=True,
)
def rope(view: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """_C::rotary_embedding, in place and without a key: queries and keys come here alike."""
    tokens, _, dim = x.shape
    out = x.clone(memory_format=torch.contiguous_format)
    vllm.rotary_embedding(
        positions, out.view(tokens, -1), None, dim, view.table.in_dtype(x.dtype), not view.interleaved
    )
    return out


@KERNELS("silu_mul", "vllm_xpu", rank=RANK_FUSED, when=When(FLOATS, features=OPERATORS), capture_safe=True)
def silu_mul(view: Any, x: torch.Tensor) -> torch.Tensor:
    """_C::silu_and_mul: SiLU of the first half times the second."""
    return forms.silu_mul(vllm.silu_and_mul, x)
