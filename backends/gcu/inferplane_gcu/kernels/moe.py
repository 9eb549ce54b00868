"""Mixture of experts: routing, alignment to blocks of 64 pairs, two grouped products, the weighted sum.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9, vllm_gcu/kernels/fused_moe.py and modular_experts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from inferplane.kernels.fused.needs import (
    ALL_EXPERTS_LOCAL,
    FLOATS,
    INT8_ACTIVATIONS,
    PLAIN_SOFTMAX_ROUTING,
    declare_fused,
)
from inferplane.kernels.fused.operands import allocate_routing
from inferplane.plugin import Kernels, Packing, QTensor
from inferplane_gcu.kernels.products import SCALE_PER_ROW, quantize_rows
from inferplane_gcu.kernels.when import OPERATORS

vllm, moe = torch.ops._C, torch.ops._moe_C
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="vllm_gcu", features=OPERATORS)
BLOCK_PAIRS = 64
"""Pairs a block; vllm-gcu takes no other on this chip."""
MANY_EXPERTS = 224
"""From here on vllm-gcu calls another alignment."""


def _has_supported_groups(op: Any) -> bool:
    return op.groups > 1 and op.group_score == ("max" if op.bias is None else "top2")


@fused("moe_route", PLAIN_SOFTMAX_ROUTING, dtypes=FLOATS)
def moe_route(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """_moe_C::topk_softmax, which does not renormalize; ids are int32."""
    weights, ids = allocate_routing(logits, view.top_k)
    moe.topk_softmax(weights, ids, torch.empty_like(ids), logits.float())
    return (weights / weights.sum(-1, keepdim=True) if view.renormalize else weights) * view.factor, ids


@fused(
    "moe_route",
    ("groups, judged by two experts where there is a bias, else by one", _has_supported_groups),
    dtypes=FLOATS,
)
def moe_route_grouped(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """_C::fused_grouped_topk; it knows no factor."""
    weights, ids = allocate_routing(logits, view.top_k)
    vllm.fused_grouped_topk(
        weights,
        ids,
        logits.contiguous(),
        view.top_k,
        view.renormalize,
        view.groups,
        view.top_groups,
        view.bias,
        view.score,
    )
    return weights * view.factor, ids


Aligned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Pairs by expert in whole blocks, each block's expert, and how many entries are used; all int32."""
Product = Callable[..., None]
"""A product over experts: `(result, rows, weight, weights, ids, aligned pairs, weighted, experts per row)`."""


def _multiply(
    out: torch.Tensor, x: torch.Tensor, weight: Any, weights: torch.Tensor, ids: torch.Tensor, aligned: Any,
    weighted: bool, k: int,
) -> None:  # fmt: skip
    vllm.fused_moe_kernel(out, x, weight, weights, ids, *aligned, weighted, k, BLOCK_PAIRS, None)


def run_experts(
    view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, shape: Sequence[int], product: Product
) -> torch.Tensor:
    """Five calls; how many blocks an expert has is known to the device alone. `shape` is `E, N` of gate and up."""
    experts, columns = shape
    tokens, k = ids.shape
    ids, weights = ids.int().contiguous(), weights.float().contiguous()
    aligned = _align_pairs(ids, experts)
    h = x.new_empty(tokens, k, columns)
    product(h, x.contiguous(), view.gate_up, weights, ids, aligned, False, k)
    act = x.new_empty(tokens * k, columns // 2)
    vllm.silu_and_mul(act, h.view(tokens * k, columns))
    y = x.new_empty(tokens, k, x.shape[1])
    product(y, act, view.down, weights, ids, aligned, True, 1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    moe.moe_sum_pad(out, y, torch.full((1,), tokens, dtype=torch.int32, device=x.device), 1, False)
    return out


@fused("moe_experts", ALL_EXPERTS_LOCAL)
def moe_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Experts in the activations' dtype."""
    return run_experts(view, x, weights, ids, view.gate_up.shape[:2], _multiply)


class Int8Stack:
    """Experts in int8: `data` `[E, N, K]` and a scale a row, `[E, N]`, in the activations' dtype.

    Args:
        weight: a stack without zero points, which the product is given none of.
    """

    def __init__(self, weight: QTensor) -> None:
        self.data, self.scale = weight.data.contiguous(), weight.scale[..., 0].contiguous()
        self._cast: dict[torch.dtype, torch.Tensor] = {}

    def scale_in(self, dtype: torch.dtype) -> torch.Tensor:
        """The scales in a dtype; cast once."""
        if dtype not in self._cast:
            self._cast[dtype] = self.scale.to(dtype)
        return self._cast[dtype]


INT8_EXPERTS = Packing("vllm_gcu.int8_experts", Int8Stack)


class Operand(NamedTuple):
    """Quantized experts as fused_moe_quant_kernel takes them: entries, scales, columns that share a scale (or
    `SCALE_PER_ROW`), and zero points times scales, which int8 is without.
    """

    data: torch.Tensor
    scale: torch.Tensor
    group: int
    zero: torch.Tensor | None


def multiply_quantized(
    out: torch.Tensor, x: torch.Tensor, weight: Operand, weights: torch.Tensor, ids: torch.Tensor, aligned: Aligned,
    weighted: bool, k: int,
) -> None:  # fmt: skip
    """_C::fused_moe_quant_kernel, whose weights are expanded within the product."""
    vllm.fused_moe_quant_kernel(
        out, x, weight.data, None, weight.scale, weight.group, weight.zero, weights, ids, *aligned, weighted, k,
        BLOCK_PAIRS, None, None,
    )  # fmt: skip


def _multiply_int8(
    out: torch.Tensor, x: torch.Tensor, weight: Int8Stack, weights: torch.Tensor, ids: torch.Tensor, aligned: Any,
    weighted: bool, k: int,
) -> None:  # fmt: skip
    scale = weight.scale_in(x.dtype)
    multiply_quantized(out, x, Operand(weight.data, scale, SCALE_PER_ROW, None), weights, ids, aligned, weighted, k)


@fused(
    "moe_experts",
    ALL_EXPERTS_LOCAL,
    formats=("int8_row",),
    packs={"gate_up": INT8_EXPERTS, "down": INT8_EXPERTS},
)
def moe_experts_w8a16(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """_C::fused_moe_quant_kernel without scales of activations: weights in int8, expanded within the product.

    Source: invoke_fused_moe_kernel and MoeWNA16GCUMethod of the same repository (use_int8_w8a16).
    """
    return run_experts(view, x, weights, ids, view.gate_up.data.shape[:2], _multiply_int8)


INT8_BY_INT8 = 1
"""Value of `gs` where both sides are in int8, with a scale a row."""


class Int8Experts(NamedTuple):
    """Experts in int8 for activations in int8: `data` `[E, N, K]` and a scale a row, float32 `[E, 1, N]`."""

    data: torch.Tensor
    scale: torch.Tensor


INT8_BOTH = Packing(
    "vllm_gcu.int8_by_int8_experts",
    lambda w: Int8Experts(w.data.contiguous(), w.scale.transpose(-1, -2).contiguous()),
)


def _multiply_int8_by_int8(
    out: torch.Tensor, x: torch.Tensor, weight: Int8Experts, weights: torch.Tensor, ids: torch.Tensor, aligned: Any,
    weighted: bool, k: int,
) -> None:  # fmt: skip
    rows, scales = quantize_rows(x)
    vllm.fused_moe_quant_kernel(
        out, rows, weight.data, scales, weight.scale, INT8_BY_INT8, None, weights, ids, *aligned, weighted, k,
        BLOCK_PAIRS, None, None,
    )  # fmt: skip


@fused(
    "moe_experts",
    ALL_EXPERTS_LOCAL,
    dtypes=(torch.bfloat16,),
    formats=("int8_row",),
    features=(*OPERATORS, "int8-dot"),
    packs={"gate_up": INT8_BOTH, "down": INT8_BOTH},
    **INT8_ACTIVATIONS,
)
def moe_experts_w8a8(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """_C::fused_moe_quant_kernel with scales of activations: both sides of both products in int8.

    Source: invoke_fused_moe_kernel, TritonExpertsPad and GCUCompressedTensorsW8A8Int8MoEMethod of the same repository
    (use_int8_w8a8, per_act_token_quant).
    """
    return run_experts(view, x, weights, ids, view.gate_up.data.shape[:2], _multiply_int8_by_int8)


def _align_pairs(ids: torch.Tensor, experts: int) -> Aligned:
    """Sort the pairs of `ids` `[T, k]` by expert."""
    size = ids.numel() + experts * (BLOCK_PAIRS - 1)
    pairs, owners, used = ids.new_empty(size), ids.new_empty(size // BLOCK_PAIRS), ids.new_empty(1)
    align = moe.sgl_moe_align_block_size if experts >= MANY_EXPERTS else moe.moe_align_block_size
    align(ids, experts, BLOCK_PAIRS, pairs, owners, used)
    return pairs, owners, used
