"""Norms, rotary positions, activation and weight-only products: vLLM's operators as vllm-gcu registers them.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9, csrc/torch_bindings.cpp and vllm_gcu/kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.kernels.fused import forms
from inferplane.kernels.fused.needs import ADD_NORM_WEIGHT, HALF, NORM_WEIGHT, RANK_FUSED, WEIGHT_ONLY
from inferplane.kernels.fused.operands import last_head_as_key
from inferplane.kernels.fused.packings import Int8Rows, RopeTable
from inferplane.plugin import Kernels, Packing, When
from inferplane_gcu.kernels.when import OPERATORS

vllm = torch.ops._C
KERNELS = Kernels()
WHOLE_ROW = -1
"""Value of `group_size`: a scale a row."""


TABLE = Packing("vllm_gcu.rope_table", RopeTable)
INT8_ROWS = Packing("vllm_gcu.int8_rows", Int8Rows)


@KERNELS(
    "rms_norm",
    "vllm_gcu",
    rank=RANK_FUSED,
    when=When(HALF, features=OPERATORS, needs=(NORM_WEIGHT,)),
    capture_safe=True,
)
def rms_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """_C::rms_norm, which takes contiguous rows."""
    return forms.rms_norm(vllm.rms_norm, view, x)


@KERNELS(
    "add_rms_norm",
    "vllm_gcu",
    rank=RANK_FUSED,
    when=When(HALF, features=OPERATORS, needs=(ADD_NORM_WEIGHT,)),
    capture_safe=True,
)
def add_rms_norm(view: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """_C::fused_add_rms_norm, whose first argument becomes the norm and second the sum; the first layer has no sum."""
    if residual is None:
        return rms_norm(view.norm, x), x
    return forms.add_rms_norm(vllm.fused_add_rms_norm, view.norm, x, residual)


@KERNELS(
    "rope", "vllm_gcu", rank=RANK_FUSED, when=When(HALF, features=OPERATORS), packs={"table": TABLE}, capture_safe=True
)
def rope(view: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """_C::rotary_embedding, in place, of queries and keys at once: the last head goes as the key."""
    dim, table, neox = x.shape[-1], view.table.in_dtype(x.dtype), not view.interleaved
    return last_head_as_key(x, lambda rest, last: vllm.rotary_embedding(positions, rest, last, dim, table, neox))


@KERNELS("silu_mul", "vllm_gcu", rank=RANK_FUSED, when=When(HALF, features=OPERATORS), capture_safe=True)
def silu_mul(view: Any, x: torch.Tensor) -> torch.Tensor:
    """_C::silu_and_mul: SiLU of the first half times the second."""
    return forms.silu_mul(vllm.silu_and_mul, x)


@KERNELS(
    "linear",
    "vllm_gcu",
    rank=RANK_FUSED,
    when=When(HALF, formats=("int8_row",), features=OPERATORS, needs=(WEIGHT_ONLY,)),
    packs={"weight": INT8_ROWS},
    capture_safe=True,
)
def linear_w8a16(view: Any, x: torch.Tensor) -> torch.Tensor:
    """_C::weight_only_quant: weights in int8, expanded within the product; scales have the activations' dtype."""
    w: Int8Rows = view.weight
    out = x.new_empty(x.shape[0], w.data.shape[0])
    vllm.weight_only_quant(out, x.contiguous(), w.data, view.bias, w.scale.to(x.dtype), WHOLE_ROW)
    return w.shifted(out, x)
