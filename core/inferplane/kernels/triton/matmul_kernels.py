"""Declares the matrix kernels: quantized linear layers, gated MLPs, experts and their routing, whole MoE layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inferplane.kernels.triton.tiles import Products
from inferplane.kernels.triton.weight_packing import DEPTH, PACKING
from inferplane.types import RANK_PORTABLE, Context, Kernel, When

FOLDER = "inferplane.kernels.triton"
EXPERTS = "experts.moe"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)
INT4 = ("int4_row", "int4_group", "int4_group64", "int4_group32")
INTEGERS = ("int8_row", "int8_group", *INT4)
FP8 = ("fp8_block", "fp8_row")
INT8 = ("int8_row", "int8_group")
QUANTIZED = (*FP8, *INTEGERS, "mxfp4", "nvfp4")
FP8_ERROR = 0.06
"""Error added by activations in FP8 where the op passes them unquantized: each number may be off by 1/16."""
INT8_ERROR = 0.03
"""Error added by activations in int8 where the op passes them unquantized: each number may be off by 1/254 of its row's
largest."""


def _has_quantized_weight(op: Any) -> bool:
    return bool(op.weight.format in QUANTIZED)


def _is_router(op: Any) -> bool:
    return op.out_dtype is torch.float32 and op.weight.dtype is None


def _is_quantized_or_router(op: Any) -> bool:
    return _has_quantized_weight(op) or _is_router(op)


def _has_matching_groups(op: Any) -> bool:
    """Whether activations are unquantized, or quantized to 8 bits by whole rows or by `DEPTH` columns, as the product
    needs."""
    if op.activation_quant is None:
        return True
    if op.activation_quant.format not in ("fp8", "int8"):
        return False
    group = op.activation_quant.group if op.activation_quant.group < op.weight.shape[-1] else 0
    return bool(group == op.activation_group and group in (0, DEPTH))


def _has_plain_activations(op: Any) -> bool:
    return op.activation_quant is None


def _is_plain_mlp(op: Any) -> bool:
    return op.is_gated_mlp and all(
        x.bias is None and x.activation_quant is None and x.out_dtype is None for x in (op.gate_up, op.down)
    )


def _is_quantized_mlp(op: Any) -> bool:
    return op.reduce is None and _is_plain_mlp(op) and all(map(_has_quantized_weight, (op.gate_up, op.down)))


def _is_on_one_rank(op: Any) -> bool:
    return op.reduce is None and op.here is None and not op.experts.partial


def _is_plain_moe(op: Any) -> bool:
    return (
        _is_router(op.router) and op.router.activation_quant is None and (op.shared is None or _is_plain_mlp(op.shared))
    )


def _has_shared_mlp_in(formats: tuple[str, ...]) -> Callable[[Any], bool]:
    """A predicate on `moe` ops: the op has no shared MLP, or one whose weights have one of `formats`."""

    def is_among(op: Any) -> bool:
        if op.shared is None:
            return True
        linears = (op.shared.gate_up, op.shared.down) if op.shared.is_gated_mlp else ()
        return bool(linears) and {x.weight.format for x in linears} <= set(formats)

    return is_among


QUANTIZED_WEIGHT = ("a quantized weight", _has_quantized_weight)
QUANTIZED_OR_ROUTER = ("a quantized weight, or a float32 result of one in the plan's dtype", _is_quantized_or_router)
ALL_EXPERTS_LOCAL = ("all experts on one rank", _is_on_one_rank)
MOE = ("a router with a float32 result, a shared MLP without bias, activations in the plan's dtype", _is_plain_moe)
SHARED_FP8 = ("a shared MLP in FP8 or INT4", _has_shared_mlp_in((*FP8, *INT4)))
SHARED_INT8 = ("a shared MLP in INT8", _has_shared_mlp_in(INT8))
MATCHING_GROUPS = ("activations as they are, or in 8 bits by whole rows or 128 columns", _has_matching_groups)
PLAIN_ACTIVATIONS = ("unquantized activations", _has_plain_activations)
PLAIN_MLP = ("one rank, quantized weights, no bias, activations in the plan's dtype", _is_quantized_mlp)


PORTABLE_PRODUCTS = Products()


def matrix_kernels(products: Callable[[Any, Context], Products] = PORTABLE_PRODUCTS.prepare) -> list[Kernel]:
    """All matrix kernels, rank 50, for a backend to declare. Pure: nothing is imported beyond torch, nothing is
    allocated.

    The providers "triton_fp8" and "triton_int8" quantize activations that the op passes unquantized; they are bound
    where the checkpoint asks for that, or by a pin.

    Args:
        products: `(op, context)` -> tile sizes, called when a kernel is linked.
    """

    def kernel(op: str, provider: str, where: str, when: When, *weights: str, **options: Any) -> Kernel:
        packs = dict.fromkeys(weights, PACKING)
        return Kernel(
            op, provider, f"{FOLDER}.{where}", when, RANK_PORTABLE, packs, products, capture_safe=True, **options
        )

    def when(formats: tuple[str, ...], *needs: Any, knows: tuple[str, ...] = ()) -> When:
        return When(FLOATS, formats, features=("triton",), needs=needs, extensions=knows)

    def when_8bit(feature: str, formats: tuple[str, ...], *needs: Any, knows: tuple[str, ...] = ()) -> When:
        return When(HALF, formats, features=("triton", feature), needs=needs, extensions=knows)

    any_format, to_fp8 = ("plain", *QUANTIZED), (*FP8, *INT4)
    fp8: dict[str, Any] = {
        "extra_error": FP8_ERROR, "quantizes_activations_to": "fp8",
        "note": "activations quantized to FP8; INT4 is multiplied in FP8 too where 64 columns or more share a scale",
    }  # fmt: skip
    int8: dict[str, Any] = {
        "extra_error": INT8_ERROR, "quantizes_activations_to": "int8", "note": "activations quantized to int8",
    }  # fmt: skip
    gates, sums = ("activation_mul",), ("moe_route.least_sum", "moe_route.sum_eps")
    mlp, both = ("gate_up.weight", "down.weight"), ("gate_up", "down")
    layer = ("router.weight", *(f"shared.{w}" for w in mlp), *(f"experts.{w}" for w in both))
    moe, unquantized = (ALL_EXPERTS_LOCAL, MOE), (QUANTIZED_WEIGHT, PLAIN_ACTIVATIONS)
    return [
        kernel("linear", "triton", "linear:linear", when(any_format, QUANTIZED_OR_ROUTER, MATCHING_GROUPS), "weight"),
        kernel("linear", "triton_fp8", "linear:linear_fp8", when_8bit("fp8", ("plain", *to_fp8), *unquantized),
               "weight", **fp8),
        kernel("linear", "triton_int8", "linear:linear_int8", when_8bit("int8-dot", ("plain", *INT8), *unquantized),
               "weight", **int8),
        kernel("lm_head", "triton", "linear:lm_head", when(QUANTIZED), "weight"),
        kernel("gated_mlp", "triton", "linear:gated_mlp", when(QUANTIZED, PLAIN_MLP, knows=gates), *mlp),
        kernel("gated_mlp", "triton_fp8", "linear:gated_mlp_fp8", when_8bit("fp8", to_fp8, PLAIN_MLP, knows=gates),
               *mlp, **fp8),
        kernel("gated_mlp", "triton_int8", "linear:gated_mlp_int8", when_8bit("int8-dot", INT8, PLAIN_MLP, knows=gates),
               *mlp, **int8),
        kernel("moe_experts", "triton", f"{EXPERTS}:moe_experts", when(any_format), *both),
        kernel("moe_experts", "triton_fp8", f"{EXPERTS}:moe_experts_fp8", when_8bit("fp8", to_fp8), *both, **fp8),
        kernel("moe_experts", "triton_int8", f"{EXPERTS}:moe_experts_int8", when_8bit("int8-dot", INT8), *both, **int8),
        kernel("clamped_experts", "triton", f"{EXPERTS}:moe_experts", when(any_format), *both),
        kernel("moe", "triton", f"{EXPERTS}_layer:moe", when(any_format, *moe, knows=("clamped_experts", *sums)),
               *layer),
        kernel("moe", "triton_fp8", f"{EXPERTS}_layer:moe_fp8",
               when_8bit("fp8", ("plain", *to_fp8), *moe, SHARED_FP8, knows=sums), *layer, **fp8),
        kernel("moe", "triton_int8", f"{EXPERTS}_layer:moe_int8",
               when_8bit("int8-dot", ("plain", *INT8), *moe, SHARED_INT8, knows=sums), *layer, **int8),
        Kernel(
            "moe_route", "triton", f"{FOLDER}.{EXPERTS}_route:moe_route",
            When(FLOATS, features=("triton",), extensions=sums), RANK_PORTABLE, prepare=products, capture_safe=True,
            batch_invariant=True,
        ),
    ]  # fmt: skip
