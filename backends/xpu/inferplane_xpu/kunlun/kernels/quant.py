"""Products with quantized weights: both sides in int8, and float16 activations on int4 weights.

Where other stacks keep `max / 127` as a row's scale, the vendor's operators keep the row's maximum itself.

Source: baidu/vLLM-Kunlun at 09869ee7, vllm_kunlun/ops/_custom_ops.py (quant2d, matmul, awq_gemm, awq_dequantize),
quantization/kernels/scale_mm.py for the order of calls, quantization/awq.py for the order of int4 entries.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.heads import run_head
from inferplane.kernels.fused.needs import (
    INT8_ACTIVATIONS,
    INT8_PER_TOKEN_LINEAR,
    PLAIN_ACTIVATIONS,
    declare_fused,
)
from inferplane.kernels.fused.packings import INT4_GROUPS
from inferplane.plugin import Batch, Kernels, Packing, QTensor, UsageError
from inferplane_xpu.kunlun.kernels.when import KUNLUN
from inferplane_xpu.library import Library

kunlun = Library("kunlun_ops")
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="kunlun_ops", features=KUNLUN)
LARGEST = 127.0
"""Entry of int8 that stands for a row's maximum."""
MANY_TOKENS = 256
"""From here on the vendor expands int4 weights and calls the plain product."""
PLAIN_ORDER = 0
"""Value of `align_type`: eight columns after one another in a word."""
COLUMNS, BITS, OFFSET = 8, 4, 8
"""Of a word of int4: columns, bits each, and what is added to make them unsigned."""


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in int8 and their maxima, float32 `[T, 1]`."""
    x = x.contiguous()
    data = torch.empty_like(x, dtype=torch.int8)
    largest = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    kunlun.quant2d(x=x, y=data, max=largest, force_sdnn=True)
    return data, largest


class Rows:
    """int8 rows `[N, K]`, each one's maximum `[N, 1]`, and what a zero point takes off a row's product for each unit
    of the inputs' sum, or None: the product knows no zero points.
    """

    def __init__(self, weight: QTensor) -> None:
        self.data, self.largest = weight.data.contiguous(), weight.scale * LARGEST
        self.shift = None if weight.zero is None else (weight.scale * weight.zero)[:, 0]


class StackedRows:
    """Experts' int8 rows `[E, N, K]` and each one's maximum `[E, N]`.

    Args:
        weight: a stack without zero points, which no checkpoint of 8 bits has.
    """

    def __init__(self, weight: QTensor) -> None:
        self.data, self.largest = weight.data.contiguous(), (weight.scale[..., 0] * LARGEST).contiguous()


INT8_ROWS = Packing("kunlun_ops.int8_rows", Rows)
INT8_EXPERTS = Packing("kunlun_ops.int8_experts", StackedRows)


@fused(
    "linear",
    INT8_PER_TOKEN_LINEAR,
    features=(*KUNLUN, "int8-dot"),
    formats=("int8_row",),
    packs={"weight": INT8_ROWS},
    **INT8_ACTIVATIONS,
)
def linear_w8a8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """kunlun_ops.quant2d and matmul; the bias goes in float32. What a token of zeros becomes in int8 is written
    nowhere, and does not matter to the product, for its maximum is 0.
    """
    w: Rows = view.weight
    data, largest = quantize_rows(x)
    out = x.new_empty(x.shape[0], w.data.shape[0])
    kunlun.matmul(
        x=data,
        w=w.data,
        out=out,
        x_trans=False,
        w_trans=True,
        alpha=1.0,
        beta=0.0,
        bias=None if view.bias is None else view.bias.float(),
        x_max=None,
        w_max=None,
        x_pc_max=largest,
        w_pc_max=w.largest,
    )
    if w.shift is None:
        return out
    sums = data.float().sum(-1, keepdim=True) * (largest / LARGEST)
    return (out.float() - sums * w.shift).to(x.dtype)


def words(entries: torch.Tensor) -> torch.Tensor:
    """int4 entries, unsigned, `[K, N]` as words `[K, N / 8]`; in each byte the higher half is the column before."""
    packed = torch.zeros(entries.shape[0], entries.shape[1] // COLUMNS, dtype=torch.int32, device=entries.device)
    for place in range(COLUMNS):
        packed |= entries[:, place ^ 1 :: COLUMNS].to(torch.int32) << (place * BITS)
    return packed


class Words:
    """int4 weights `[K, N / 8]` in words, scales `[groups, N]` in float16, and zero points in words likewise."""

    def __init__(self, weight: QTensor) -> None:
        zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
        if bool((zero != zero.round()).any()) or bool((zero.abs() > OFFSET - 1).any()):
            raise UsageError(
                "Zero points of an int4 weight are no integers from -7 to 7, which the vendor's words hold."
            )
        self.data, self.zeros = words(weight.data.t() + OFFSET), words(zero.t() + OFFSET)
        self.scale, self.group = weight.scale.t().to(torch.float16).contiguous(), weight.block[1]


INT4_WORDS = Packing("kunlun_ops.int4_words", Words, dense=True)


def _has_whole_groups(op: Any) -> bool:
    rows, columns = op.weight.shape
    return rows % COLUMNS == 0 and columns % INT4_GROUPS.get(op.weight.format, 1) == 0


@fused(
    "linear",
    PLAIN_ACTIVATIONS,
    ("rows in eights and whole groups", _has_whole_groups),
    dtypes=(torch.float16,),
    formats=tuple(INT4_GROUPS),
    packs={"weight": INT4_WORDS},
)
def linear_w4a16(view: Any, x: torch.Tensor) -> torch.Tensor:
    """kunlun_ops.awq_gemm, which multiplies in float16 alone; with many tokens awq_dequantize and torch's product."""
    w: Words = view.weight
    columns = w.data.shape[1] * COLUMNS
    if x.shape[0] >= MANY_TOKENS:
        plain = x.new_empty(w.data.shape[0], columns)
        kunlun.awq_dequantize(
            qweight=w.data,
            scales=w.scale,
            zeros=w.zeros,
            weight=plain,
            group_m=w.group,
            quant_type=0,
            align_type=PLAIN_ORDER,
        )
        out = torch.matmul(x, plain)
    else:
        out = x.new_empty(x.shape[0], columns)
        kunlun.awq_gemm(
            x=x.contiguous(),
            w=w.data,
            scale=w.scale,
            zeros=w.zeros,
            out=out,
            align_type=PLAIN_ORDER,
            group_size=w.group,
        )
    return out if view.bias is None else out + view.bias


@fused(
    "lm_head",
    ("rows in eights and whole groups", _has_whole_groups),
    dtypes=(torch.float16,),
    formats=tuple(INT4_GROUPS),
    packs={"weight": INT4_WORDS},
)
def lm_head_w4a16(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As `linear_w4a16`."""
    return run_head(linear_w4a16, view, x, batch)
