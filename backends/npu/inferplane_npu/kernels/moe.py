"""Mixture of experts: gating, sorting by expert, grouped products, weighted sum, each one call.

Source: pages of npu_moe_gating_top_k, npu_moe_gating_top_k_softmax, npu_moe_init_routing_v2, npu_grouped_matmul and
npu_clipped_swiglu in Ascend/op-plugin at 517f2e7d; npu_moe_token_unpermute as in its test there; npu_grouped_matmul in
FP8, of the 950, as on its page at 02ea4757 (K-C, a scale a token and a scale a column); the order of calls as in
vllm-ascend at 182b75ea, ops/fused_moe/moe_mlp.py and token_dispatcher.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.needs import (
    ALL_EXPERTS_LOCAL,
    FLOATS,
    FP8_ACTIVATIONS,
    INT8_ACTIVATIONS,
    PLAIN_SOFTMAX_ROUTING,
    declare_fused,
)
from inferplane.kernels.fused.packings import FLOAT32, INT4_GROUPS
from inferplane.plugin import Kernels, Packing
from inferplane_npu.kernels.quant import FP8_EXPERTS, INT4_EXPERTS, INT4_FORMATS, INT8_EXPERTS, Packed
from inferplane_npu.kernels.when import OnNpu

npu = torch.ops.npu
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="torch_npu", when=OnNpu, features=("fused-infer",))
WITH_SUM_EPS = partial(OnNpu, extensions=("moe_route.sum_eps",))

SOFTMAX, SIGMOID = 0, 1
"""Values of `norm_type`."""
COUNTS = 1
"""Value of `expert_tokens_num_type` and of `group_list_type`: rows an expert, not their running sum."""
ROWS, ONE_RESULT = 0, 2
"""Values of `group_type` and of `split_item`."""

COLUMNS = Packing("torch_npu.experts", lambda w: w.transpose(1, 2))
"""`[E, K, N]` as a view: the page allows a transposed weight, and a copy would be one for nothing."""


def _experts(op: Any) -> int | None:
    """Number of experts, where the op's fields tell it."""
    return None if op.bias is None else op.bias.shape[0]


def _has_supported_groups(op: Any) -> bool:
    """At least three experts a group; judged by the bias, and without one by how many experts of a group are chosen."""
    experts = _experts(op)
    if experts is None:
        return op.groups == 1 or op.top_k > 2 * op.top_groups
    size = experts // op.groups
    return experts % op.groups == 0 and size > 2 and -(-size // 32) * 32 * op.groups <= 2048


def _has_renormalized_sigmoid(op: Any) -> bool:
    return op.score == "softmax" or op.renormalize


@fused(
    "moe_route",
    ("a bias, groups, or sigmoid scores", lambda op: not PLAIN_SOFTMAX_ROUTING[1](op)),
    ("sigmoid scores to be renormalized", _has_renormalized_sigmoid),
    ("more than two experts a group", _has_supported_groups),
    dtypes=FLOATS,
    when=WITH_SUM_EPS,
    packs={"bias": FLOAT32},
)
def moe_route(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_moe_gating_top_k, which renormalizes sigmoid scores always and softmax scores never; ids are int32."""
    again = view.score == "softmax" and view.renormalize
    weights, ids, _ = npu.npu_moe_gating_top_k(
        logits,
        view.top_k,
        bias=view.bias,
        k_group=view.top_groups if view.groups > 1 else 1,
        group_count=view.groups,
        group_select_mode=1 if view.group_score == "top2" else 0,
        norm_type=SIGMOID if view.score == "sigmoid" else SOFTMAX,
        routed_scaling_factor=1.0 if again else view.factor,
        eps=view.sum_eps or 1e-20,
    )
    return (_renormalize(view, weights) if again else weights), ids


@fused(
    "moe_route",
    PLAIN_SOFTMAX_ROUTING,
    ("at most 1024 chosen", lambda op: op.top_k <= 1024),
    dtypes=FLOATS,
    when=WITH_SUM_EPS,
)
def moe_route_softmax(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_moe_gating_top_k_softmax; ids are int32."""
    weights, ids, _ = npu.npu_moe_gating_top_k_softmax(logits, None, view.top_k)
    return (_renormalize(view, weights) if view.renormalize else weights * view.factor), ids


def _renormalize(view: Any, weights: torch.Tensor) -> torch.Tensor:
    return weights / (weights.sum(-1, keepdim=True) + view.sum_eps) * view.factor


def _has_supported_inner_dims(op: Any) -> bool:
    experts, columns, width = op.gate_up.shape
    return 1 < experts <= 1024 and max(columns, width) < 65536


SIZES = ("2 to 1024 experts with fewer than 65536 rows and columns", _has_supported_inner_dims)


@fused("moe_experts", SIZES, ALL_EXPERTS_LOCAL, dtypes=FLOATS, packs={"gate_up": COLUMNS, "down": COLUMNS})
def moe_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Five calls; how many rows an expert has is known to the device alone."""
    rows, places, counts = _sort_pairs(view.gate_up.shape[0], x, ids)
    h = npu.npu_swiglu(_multiply_groups(rows, view.gate_up, counts))
    return npu.npu_moe_token_unpermute(_multiply_groups(h, view.down, counts), places, weights.to(x.dtype))


def _sort_pairs(experts: int, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows by expert `[T k, D]`, where each of the `T k` pairs went (int32), rows an expert (int64 `[E]`)."""
    rows, places, counts, _ = npu.npu_moe_init_routing_v2(
        x.contiguous(),
        ids.int(),
        active_num=ids.numel(),
        expert_num=experts,
        expert_tokens_num_type=COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[0, experts],
    )
    return rows, places, counts


def _multiply_groups(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, **more: Any) -> torch.Tensor:
    return npu.npu_grouped_matmul(
        [rows], [weight], group_list=counts, split_item=ONE_RESULT, group_type=ROWS, group_list_type=COUNTS, **more
    )[0]


def _run_quantized_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    def product(rows: torch.Tensor, packed: Packed) -> torch.Tensor:
        offset = packed.offset_in(x.dtype)
        more = {} if offset is None else {"antiquant_offset": [offset]}
        return _multiply_groups(rows, packed.data, counts, antiquant_scale=[packed.scale_in(x.dtype)], **more)

    rows, places, counts = _sort_pairs(view.gate_up.data.shape[0], x, ids)
    h = npu.npu_swiglu(product(rows, view.gate_up))
    return npu.npu_moe_token_unpermute(product(h, view.down), places, weights.to(x.dtype))


GROUP_VECTORS = Packing("torch_npu.group_bias", lambda b: b.float() if b.dtype is torch.bfloat16 else b.contiguous())
"""`[E, N]`: beside bfloat16 the grouped product takes biases in float32."""


@fused(
    "clamped_experts",
    SIZES,
    ALL_EXPERTS_LOCAL,
    dtypes=FLOATS,
    features=("fused-infer", "clipped-swiglu"),
    packs={"gate_up": COLUMNS, "down": COLUMNS, "gate_up_bias": GROUP_VECTORS, "down_bias": GROUP_VECTORS},
)
def clamped_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As `moe_experts`, with biases, and npu_clipped_swiglu in its form for gpt-oss, whose columns alternate.

    The page of npu_grouped_matmul has a bias of one dimension for each of several weights; Huawei's recipe for gpt-oss
    passes `[E, N]` beside one weight (cann-recipes-infer, models/gpt-oss), and so does this.
    """
    rows, places, counts = _sort_pairs(view.gate_up.shape[0], x, ids)
    h = _multiply_groups(rows, view.gate_up, counts, bias=[view.gate_up_bias])
    h = npu.npu_clipped_swiglu(h, alpha=view.alpha, limit=view.limit, bias=1.0, interleaved=True)
    bias = {} if view.down_bias is None else {"bias": [view.down_bias]}
    return npu.npu_moe_token_unpermute(_multiply_groups(h, view.down, counts, **bias), places, weights.to(x.dtype))


@fused(
    "moe_experts",
    SIZES,
    ALL_EXPERTS_LOCAL,
    formats=("int8_row",),
    packs={"gate_up": INT8_EXPERTS, "down": INT8_EXPERTS},
)
def moe_experts_int8(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights in int8, expanded within the grouped product."""
    return _run_quantized_experts(view, x, weights, ids)


def _has_int4_dims(op: Any) -> bool:
    return all(w.shape[1] % 8 == 0 for w in (op.gate_up, op.down))


def _has_whole_groups(op: Any) -> bool:
    return all(w.shape[2] % INT4_GROUPS.get(w.format, 1) == 0 for w in (op.gate_up, op.down))


@fused(
    "moe_experts",
    SIZES,
    ALL_EXPERTS_LOCAL,
    ("rows in eights", _has_int4_dims),
    ("whole groups of columns", _has_whole_groups),
    formats=INT4_FORMATS,
    packs={"gate_up": INT4_EXPERTS, "down": INT4_EXPERTS},
)
def moe_experts_int4(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights in int4, eight to an int32, expanded within the grouped product."""
    return _run_quantized_experts(view, x, weights, ids)


def _run_experts_in_8_bits(
    view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Both sides of both products in 8 bits, with a scale a row of each. What a row of zeros is quantized to is not
    documented, so its results are set.
    """

    def product(rows: torch.Tensor, packed: Packed) -> torch.Tensor:
        data, scale = npu.npu_dynamic_quant(rows, dst_type=dtype)
        # bfloat16 results take scales in either dtype on the 950, and in bfloat16 alone on the others.
        columns = packed.scale if dtype is not torch.int8 else packed.scale_in(_scale_dtype(x.dtype))
        y = _multiply_groups(data, packed.data, counts, scale=[columns], per_token_scale=[scale], output_dtype=x.dtype)
        return y.masked_fill((scale == 0)[:, None], 0.0)

    rows, places, counts = _sort_pairs(view.gate_up.data.shape[0], x, ids)
    h = npu.npu_swiglu(product(rows, view.gate_up))
    return npu.npu_moe_token_unpermute(product(h, view.down), places, weights.to(x.dtype))


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the scales of weights in int8, by the results' dtype."""
    return torch.bfloat16 if dtype is torch.bfloat16 else torch.float32


@fused(
    "moe_experts",
    SIZES,
    ALL_EXPERTS_LOCAL,
    features=("fused-infer", "int8-dot"),
    formats=("int8_row",),
    packs={"gate_up": INT8_EXPERTS, "down": INT8_EXPERTS},
    **INT8_ACTIVATIONS,
)
def moe_experts_w8a8(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Both sides in int8."""
    return _run_experts_in_8_bits(view, x, weights, ids, torch.int8)


@fused(
    "moe_experts",
    SIZES,
    ALL_EXPERTS_LOCAL,
    features=("fused-infer", "fp8"),
    formats=("fp8_row",),
    packs={"gate_up": FP8_EXPERTS, "down": FP8_EXPERTS},
    **FP8_ACTIVATIONS,
)
def moe_experts_fp8(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Both sides in FP8, on the 950."""
    return _run_experts_in_8_bits(view, x, weights, ids, torch.float8_e4m3fn)
