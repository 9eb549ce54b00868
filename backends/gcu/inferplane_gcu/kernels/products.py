"""Weight-only products by vllm-gcu's operator.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9, csrc/torch_bindings.cpp and vllm_gcu/kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.kernels.fused.heads import run_head
from inferplane.kernels.fused.needs import PLAIN_ACTIVATIONS, declare_fused
from inferplane.kernels.fused.packings import Int8Rows
from inferplane.plugin import Batch, Kernels, Packing
from inferplane_gcu.kernels.when import OPERATORS

vllm = torch.ops._C
KERNELS = Kernels()
SCALE_PER_ROW = -1
"""Value of `group_size`."""
INT8_ROWS = Packing("vllm_gcu.int8_rows", Int8Rows)


@declare_fused(
    KERNELS,
    "linear",
    PLAIN_ACTIVATIONS,
    provider="vllm_gcu",
    formats=("int8_row",),
    features=OPERATORS,
    packs={"weight": INT8_ROWS},
)
def linear_w8a16(view: Any, x: torch.Tensor) -> torch.Tensor:
    """_C::weight_only_quant: weights in int8, expanded within the product; scales have the activations' dtype."""
    w: Int8Rows = view.weight
    out = x.new_empty(x.shape[0], w.data.shape[0])
    vllm.weight_only_quant(out, x.contiguous(), w.data, view.bias, w.scale.to(x.dtype), SCALE_PER_ROW)
    return w.subtract_zero_points(out, x)


@declare_fused(
    KERNELS, "lm_head", provider="vllm_gcu", formats=("int8_row",), features=OPERATORS, packs={"weight": INT8_ROWS}
)
def lm_head_w8a16(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As `linear_w8a16`."""
    return run_head(linear_w8a16, view, x, batch)
