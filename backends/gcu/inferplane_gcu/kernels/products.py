"""Products with weights in int8 by vllm-gcu's operators, of activations as they are and in int8.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9, csrc/torch_bindings.cpp and vllm_gcu/kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.kernels.fused.heads import run_head
from inferplane.kernels.fused.needs import INT8_ACTIVATIONS, INT8_PER_TOKEN_LINEAR, PLAIN_ACTIVATIONS, declare_fused
from inferplane.kernels.fused.packings import Int8Rows
from inferplane.plugin import Batch, Kernels, Packing, QTensor
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


class Int8Columns(Int8Rows):
    """As `Int8Rows`, but `data` is `[K, N]`."""

    def __init__(self, weight: QTensor) -> None:
        super().__init__(weight)
        self.data = self.data.t().contiguous()


INT8_COLUMNS = Packing("vllm_gcu.int8_columns", Int8Columns)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """_C::dynamic_scaled_int8_quant: rows `[T, K]` in int8, and a scale for each, float32 `[T, 1]`."""
    rows, scales = torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    vllm.dynamic_scaled_int8_quant(rows, x, scales, None)
    return rows, scales


@declare_fused(
    KERNELS,
    "linear",
    INT8_PER_TOKEN_LINEAR,
    provider="vllm_gcu",
    dtypes=(torch.bfloat16,),
    formats=("int8_row",),
    features=(*OPERATORS, "int8-dot"),
    packs={"weight": INT8_COLUMNS},
    **INT8_ACTIVATIONS,
)
def linear_w8a8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """_C::dot_bias_quant of int8 by int8, whose scales are the weight's: those of tokens come behind it, and the bias.

    Without the tokens' scales a result is up to some thousand times as large, which float16 does not reach.

    Source: W8A8LinearMethod of the same repository, vllm_gcu/kernels/quantization/w8a8.py.
    """
    w: Int8Columns = view.weight
    rows, scales = quantize_rows(x.contiguous())
    out = x.new_empty(x.shape[0], w.data.shape[1])
    vllm.dot_bias_quant(out, rows, w.data, w.scale, None)
    scaled = out.float() * scales
    out = w.subtract_zero_points(scaled if view.bias is None else scaled + view.bias, rows, scales)
    return out.to(x.dtype)


@declare_fused(
    KERNELS, "lm_head", provider="vllm_gcu", formats=("int8_row",), features=OPERATORS, packs={"weight": INT8_ROWS}
)
def lm_head_w8a16(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As `linear_w8a16`."""
    return run_head(linear_w8a16, view, x, batch)
