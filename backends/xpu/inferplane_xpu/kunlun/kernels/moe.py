"""Mixture of experts: routing, sorting by expert, two grouped products, the weighted sum.

Source: baidu/vLLM-Kunlun at 09869ee7, vllm_kunlun/ops/_kunlun_ops.py (fused_moe) and _custom_ops.py; what the routings
compute, and up to how many experts, as its tests found on a P800: ops/moe/router.py and tests/ut/ops at f926eebd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.needs import (
    ALL_EXPERTS_LOCAL,
    FLOATS,
    INT8_ACTIVATIONS,
    PLAIN_SOFTMAX_ROUTING,
    declare_fused,
)
from inferplane.kernels.fused.operands import allocate_routing
from inferplane.kernels.fused.packings import FLOAT32
from inferplane.plugin import Kernels
from inferplane_xpu.kunlun.kernels.quant import INT8_EXPERTS, StackedRows, quantize_rows
from inferplane_xpu.kunlun.kernels.when import GROUP_TOPK, KUNLUN, SPEEDGATE
from inferplane_xpu.library import Library

kunlun = Library("kunlun_ops")
speedgate = torch.ops.xspeedgate_ops
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="kunlun_ops", features=KUNLUN)
CLUSTERS = 12
"""Rows of `block_statistic`: counts by cluster of the card."""
FEW_PAIRS = 768
"""Up to here the vendor sorts with another operator."""
MOST_EXPERTS = 512
"""That the routings take."""


def _has_sigmoid_groups(op: Any) -> bool:
    return (
        op.score == "sigmoid"
        and op.bias is not None
        and op.bias.shape[0] <= MOST_EXPERTS
        and op.groups > 1
        and op.group_score == "top2"
        and op.renormalize
    )


def _has_best_groups(op: Any) -> bool:
    return op.bias is None and op.groups > 1 and op.group_score == "max"


def _statistic(experts: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(CLUSTERS, experts, dtype=torch.int32, device=device)


@fused("moe_route", PLAIN_SOFTMAX_ROUTING, dtypes=FLOATS)
def moe_route(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """kunlun_ops.moe_softmax_topk_norm, or moe_softmax_topk, which does not renormalize; ids are int32."""
    weights, ids = allocate_routing(logits, view.top_k)
    if view.renormalize:
        kunlun.moe_softmax_topk_norm(logits.contiguous(), weights, ids, None, False)
    else:
        kunlun.moe_softmax_topk(logits.contiguous(), weights, ids, None)
    return (weights if view.factor == 1.0 else weights * view.factor), ids


@fused(
    "moe_route",
    ("sigmoid scores with a bias, groups judged by two experts, weights renormalized", _has_sigmoid_groups),
    dtypes=FLOATS,
    packs={"bias": FLOAT32},
)
def moe_route_grouped(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """kunlun_ops.moe_sigmoid_group_topk_norm, which renormalizes and scales."""
    weights, ids = allocate_routing(logits, view.top_k)
    kunlun.moe_sigmoid_group_topk_norm(
        x=logits.contiguous(),
        norm_score=weights,
        topk_index=ids,
        block_static=_statistic(logits.shape[1], logits.device),
        bias=view.bias,
        n_group=view.groups,
        topk_group=view.top_groups,
        scale=view.factor,
    )
    return weights, ids


@fused(
    "moe_route",
    ("groups judged by one expert, without a bias", _has_best_groups),
    dtypes=FLOATS,
    features=(*KUNLUN, *GROUP_TOPK),
)
def moe_route_best_groups(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """kunlun_ops.moe_group_topk chooses by scores that it is given, and returns them as they are."""
    scores = logits.sigmoid() if view.score == "sigmoid" else logits.softmax(-1)
    weights, ids = allocate_routing(logits, view.top_k)
    kunlun.moe_group_topk(
        scores, view.groups, view.top_groups, weights, ids, _statistic(logits.shape[1], logits.device)
    )
    return (weights / weights.sum(-1, keepdim=True) if view.renormalize else weights) * view.factor, ids


def _sort_pairs(x: torch.Tensor, ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each pair of token and expert stands among pairs in the order of experts `[pairs]`, each expert's first
    place `[experts + 1]`, both int32, and the pairs' rows of `x` in that order.
    """
    pairs = ids.numel()
    if pairs <= FEW_PAIRS:
        places, starts, rows = speedgate.moe_pre_small(ids, experts, False, True, x)
        return places, starts, rows.reshape(pairs, -1)
    statistic = _statistic(experts, x.device)
    kunlun.gen_block_statistic(ids, statistic)
    rows, places = x.new_empty(pairs, x.shape[1]), torch.zeros_like(ids).flatten()
    counts, starts = (torch.zeros(n, dtype=torch.int32, device=x.device) for n in (experts, experts + 1))
    kunlun.moe_pre_sorted(x, ids, statistic, rows, places, counts, starts)
    return places, starts, rows


Product = Callable[[torch.Tensor, Any, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""A product over experts: `(rows, weight, where experts start, places of pairs, result)`."""


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, places: torch.Tensor, y: torch.Tensor
) -> None:
    kunlun.moe_fc(x=x, weight=weight, sorted_tokens_num_lod=starts, sorted_tokens_idx=places, moe_topk=y.shape[1], y=y)


def _multiply_int8(
    x: torch.Tensor, weight: StackedRows, starts: torch.Tensor, places: torch.Tensor, y: torch.Tensor
) -> None:
    data, largest = quantize_rows(x)
    kunlun.moe_fc(
        x=data,
        weight=weight.data,
        sorted_tokens_num_lod=starts,
        sorted_tokens_idx=places,
        moe_topk=y.shape[1],
        y=y,
        x_perchannel_max=largest,
        w_perchannel_max=weight.largest,
    )


@fused("moe_experts", ALL_EXPERTS_LOCAL, features=(*KUNLUN, *SPEEDGATE))
def moe_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Experts in the activations' dtype."""
    return _run_experts(view, x, weights, ids, view.gate_up.shape, _multiply)


@fused(
    "moe_experts",
    ALL_EXPERTS_LOCAL,
    features=(*KUNLUN, *SPEEDGATE, "int8-dot"),
    formats=("int8_row",),
    packs={"gate_up": INT8_EXPERTS, "down": INT8_EXPERTS},
    **INT8_ACTIVATIONS,
)
def moe_experts_w8a8(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Both sides of both products in int8; a pair's row is quantized before each.

    Source: the chain of calls and its reference in vllm_kunlun/ops (fused_moe_int8) and tests/ut/ops at f926eebd.
    """
    return _run_experts(view, x, weights, ids, view.gate_up.data.shape, _multiply_int8)


def _run_experts(
    view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, shape: Sequence[int], product: Product
) -> torch.Tensor:
    """Rows stay in the order of experts from the sorting to the sum, which is given the position of each pair. `shape`
    is that of gate and up.
    """
    experts, columns, _ = shape
    x, ids, weights = x.contiguous(), ids.int().contiguous(), weights.float().contiguous()
    places, starts, rows = _sort_pairs(x, ids, experts)
    h = x.new_empty(*ids.shape, columns)
    product(rows, view.gate_up, starts, places, h)
    act = x.new_empty(ids.numel(), columns // 2)
    kunlun.swiglu(x=h.view(-1, columns), y=act)
    y = x.new_empty(*ids.shape, x.shape[1])
    product(act, view.down, starts, places, y)
    out = torch.empty_like(x)
    kunlun.moe_post(y, places.view_as(ids), weights, torch.ones_like(weights), out)
    return out
