"""Which matrix kernels there are: quantized linear layers, gated MLPs, experts and their routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inferplane.kernels.triton.tiles import Products
from inferplane.kernels.triton.weight_packing import DEPTH, PACKING
from inferplane.types import RANK_PORTABLE, Context, Kernel, When

FOLDER = "inferplane.kernels.triton"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)
INTEGERS = ("int8_row", "int8_group", "int4_row", "int4_group", "int4_group64", "int4_group32")
FP8 = ("fp8_block", "fp8_row")
INT4 = tuple(name for name in INTEGERS if name.startswith("int4"))
INT8 = ("int8_row", "int8_group")
QUANTIZED = (*FP8, *INTEGERS)
FP8_ERROR = 0.06
"""Of activations in FP8 where the op does not ask for them: each number may be off by 1/16."""
INT8_ERROR = 0.03
"""Of activations in int8 where the op does not ask for them: each number may be off by 1/254 of its row's largest."""


def _quantized(op: Any) -> bool:
    return bool(op.weight.format in QUANTIZED)


def _routes(op: Any) -> bool:
    return op.out_dtype is torch.float32 and op.weight.dtype is None


def _quantized_or_routes(op: Any) -> bool:
    return _quantized(op) or _routes(op)


def _coded_alike(op: Any) -> bool:
    if op.act is None:
        return True
    group = op.act.group if op.act.group < op.weight.shape[-1] else 0
    return bool(group == op.act_group and group in (0, DEPTH))


def _no_act(op: Any) -> bool:
    return op.act is None


def _bare(op: Any) -> bool:
    return all(x.bias is None and x.act is None and x.out_dtype is None for x in (op.gate_up, op.down))


def _two_products(op: Any) -> bool:
    return op.reduce is None and _bare(op) and _quantized(op.gate_up) and _quantized(op.down)


def _one_rank(op: Any) -> bool:
    return op.reduce is None and op.here is None and not op.experts.partial


def _ordinary(op: Any) -> bool:
    return _routes(op.router) and op.router.act is None and (op.shared is None or _bare(op.shared))


def _shared_in(formats: tuple[str, ...]) -> Callable[[Any], bool]:
    def among(op: Any) -> bool:
        return op.shared is None or {x.weight.format for x in (op.shared.gate_up, op.shared.down)} <= set(formats)

    return among


ONE = ("a quantized weight", _quantized)
HERE = ("a quantized weight, or a float32 result of one in the plan's dtype", _quantized_or_routes)
ALL_HERE = ("all experts on one rank", _one_rank)
ORDINARY = ("a router with a float32 result, a shared MLP without bias, activations in the plan's dtype", _ordinary)
SHARED_FP8 = ("a shared MLP in FP8 or INT4", _shared_in((*FP8, *INT4)))
SHARED_INT8 = ("a shared MLP in INT8", _shared_in(INT8))
ALIKE = ("activations coded by whole rows or by 128 columns", _coded_alike)
UNCODED = ("activations that the op leaves as they are", _no_act)
MLP = ("one rank, quantized weights, no bias, activations in the plan's dtype", _two_products)


ANYWHERE = Products()


def matrix_kernels(products: Callable[[Any, Context], Products] = ANYWHERE.prepare) -> list[Kernel]:
    """All of them, rank 50. Pure: nothing is imported beyond torch, nothing is allocated.

    Those whose provider is "triton_fp8" or "triton_int8" code activations where the op says nothing of it: where the
    checkpoint asks for that, or by a pin.

    Args:
        products: `(op, context)` -> tile sizes, asked when a kernel is linked.
    """

    def kernel(op: str, provider: str, where: str, when: When, *weights: str, **options: Any) -> Kernel:
        packs = dict.fromkeys(weights, PACKING)
        return Kernel(
            op, provider, f"{FOLDER}.{where}", when, RANK_PORTABLE, packs, products, capture_safe=True, **options
        )

    def when(formats: tuple[str, ...], *needs: Any) -> When:
        return When(FLOATS, formats, features=("triton",), needs=needs)

    def coding(feature: str, formats: tuple[str, ...], *needs: Any) -> When:
        return When(HALF, formats, features=("triton", feature), needs=needs)

    every, to_fp8 = ("plain", *QUANTIZED), (*FP8, *INT4)
    fp8: dict[str, Any] = {
        "extra_error": FP8_ERROR, "codes": "fp8",
        "note": "activations coded in FP8; INT4 is multiplied in FP8 too where 64 columns or more share a scale",
    }  # fmt: skip
    int8: dict[str, Any] = {"extra_error": INT8_ERROR, "codes": "int8", "note": "activations coded in int8"}
    mlp, both = ("gate_up.weight", "down.weight"), ("gate_up", "down")
    layer = ("router.weight", *(f"shared.{w}" for w in mlp), *(f"experts.{w}" for w in both))
    whole = (ALL_HERE, ORDINARY)
    return [
        kernel("linear", "triton", "linear:linear", when(every, HERE, ALIKE), "weight"),
        kernel("linear", "triton_fp8", "linear:linear_fp8", coding("fp8", ("plain", *to_fp8), ONE, UNCODED),
               "weight", **fp8),
        kernel("linear", "triton_int8", "linear:linear_int8", coding("int8-dot", ("plain", *INT8), ONE, UNCODED),
               "weight", **int8),
        kernel("lm_head", "triton", "linear:lm_head", when(QUANTIZED), "weight"),
        kernel("gated_mlp", "triton", "linear:gated_mlp", when(QUANTIZED, MLP), *mlp),
        kernel("gated_mlp", "triton_fp8", "linear:gated_mlp_fp8", coding("fp8", to_fp8, MLP), *mlp, **fp8),
        kernel("gated_mlp", "triton_int8", "linear:gated_mlp_int8", coding("int8-dot", INT8, MLP), *mlp, **int8),
        kernel("moe_experts", "triton", "moe:moe_experts", when(every), *both),
        kernel("moe_experts", "triton_fp8", "moe:moe_experts_fp8", coding("fp8", to_fp8), *both, **fp8),
        kernel("moe_experts", "triton_int8", "moe:moe_experts_int8", coding("int8-dot", INT8), *both, **int8),
        kernel("moe", "triton", "mixture:moe", when(every, *whole), *layer),
        kernel("moe", "triton_fp8", "mixture:moe_fp8", coding("fp8", ("plain", *to_fp8), *whole, SHARED_FP8),
               *layer, **fp8),
        kernel("moe", "triton_int8", "mixture:moe_int8", coding("int8-dot", ("plain", *INT8), *whole, SHARED_INT8),
               *layer, **int8),
        Kernel(
            "moe_route", "triton", f"{FOLDER}.route:moe_route", When(FLOATS, features=("triton",)), RANK_PORTABLE,
            prepare=products, capture_safe=True, batch_invariant=True,
        ),
    ]  # fmt: skip
