"""Products with weights in int4 by vllm-gcu's operators, for linear layers, the head and experts.

Weights are unsigned, 0 to 15, two to a byte: of 128 columns the first 64 are the low halves of 64 bytes, the last 64
the high halves. `w = q scale - zero`, where `zero` is a zero point times its scale, in the activations' dtype.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9: kernels/quantization/rearrange.py (rearrange_uint4_int32_uint8_gptq),
gptq.py (GPTQGCULinearMethod) and moe_wna16.py (MoeWNA16GCUMethod) for shapes and dtypes; the guide to quantization for
the groups, of 64 columns or a multiple.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.heads import run_head
from inferplane.kernels.fused.needs import ALL_EXPERTS_LOCAL, PLAIN_ACTIVATIONS, declare_fused
from inferplane.plugin import Batch, Kernels, Packing, QTensor
from inferplane_gcu.kernels.moe import Aligned, Operand, multiply_quantized, run_experts
from inferplane_gcu.kernels.when import OPERATORS

vllm = torch.ops._C
KERNELS = Kernels()
FORMATS = ("int4_group", "int4_group64")
fused = partial(declare_fused, KERNELS, provider="vllm_gcu", formats=FORMATS, features=OPERATORS)
BITS = 4
UNSIGNED = 8
"""What is added to a signed entry, and to its zero point."""
PERIOD = 128
"""Columns that are packed together; vllm-gcu's own packing pads wrongly where it does not divide them."""


class UnsignedInt4:
    """A weight in int4 as the operators read it.

    Args:
        weight: `[N, K]`, or `[E, N, K]`, signed entries with a scale for 64 or 128 columns.
        by_rows: `data` is `[..., N, K / 2]`, as experts have it, not `[..., K / 2, N]`.
    """

    def __init__(self, weight: QTensor, by_rows: bool) -> None:
        entries = (weight.data + UNSIGNED).to(torch.uint8).unflatten(-1, (-1, 2, PERIOD // 2))
        data = (entries[..., 0, :] | entries[..., 1, :] << BITS).flatten(-2)
        self.data = (data if by_rows else data.transpose(-1, -2)).contiguous()
        self.group = weight.block[1]
        self.scale = weight.scale.transpose(-1, -2).contiguous()
        zero = UNSIGNED if weight.zero is None else weight.zero.transpose(-1, -2) + UNSIGNED
        self.zero = (self.scale * zero).contiguous()
        columns = torch.arange(weight.shape[-1], dtype=torch.int32, device=weight.data.device)
        self.group_of_column = columns // self.group
        self._cast: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def in_dtype(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points times scales `[..., K / group, N]`, in the activations' dtype; cast once."""
        if dtype not in self._cast:
            self._cast[dtype] = self.scale.to(dtype), self.zero.to(dtype)
        return self._cast[dtype]


ROWS_PACKED = Packing("vllm_gcu.int4", partial(UnsignedInt4, by_rows=False), dense=True)
EXPERTS_PACKED = Packing("vllm_gcu.int4_experts", partial(UnsignedInt4, by_rows=True), dense=True)


def _has_whole_periods(op: Any) -> bool:
    return op.weight.shape[-1] % PERIOD == 0


COLUMNS = ("a multiple of 128 columns", _has_whole_periods)


@fused("linear", PLAIN_ACTIVATIONS, COLUMNS, packs={"weight": ROWS_PACKED})
def linear_w4a16(view: Any, x: torch.Tensor) -> torch.Tensor:
    """_C::gptq_gemm_gcu. The order of columns is the weight's own: `g_idx` only says so."""
    w: UnsignedInt4 = view.weight
    scale, zero = w.in_dtype(x.dtype)
    y: torch.Tensor = vllm.gptq_gemm_gcu(
        x.contiguous(), w.data, zero, scale, w.group_of_column, BITS, view.bias, w.group
    )
    return y


@fused("lm_head", COLUMNS, packs={"weight": ROWS_PACKED})
def lm_head_w4a16(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As `linear_w4a16`."""
    return run_head(linear_w4a16, view, x, batch)


def _have_whole_periods(op: Any) -> bool:
    return all(w.shape[-1] % PERIOD == 0 for w in (op.gate_up, op.down))


def _multiply(
    out: torch.Tensor, x: torch.Tensor, weight: UnsignedInt4, weights: torch.Tensor, ids: torch.Tensor,
    aligned: Aligned, weighted: bool, k: int,
) -> None:  # fmt: skip
    scale, zero = weight.in_dtype(x.dtype)
    multiply_quantized(out, x, Operand(weight.data, scale, weight.group, zero), weights, ids, aligned, weighted, k)


@fused(
    "moe_experts",
    ALL_EXPERTS_LOCAL,
    (COLUMNS[0], _have_whole_periods),
    packs={"gate_up": EXPERTS_PACKED, "down": EXPERTS_PACKED},
)
def moe_experts_w4a16(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """_C::fused_moe_quant_kernel with weights in int4."""
    experts, columns, _ = view.gate_up.data.shape
    return run_experts(view, x, weights, ids, (experts, columns), _multiply)
