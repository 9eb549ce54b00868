"""A whole mixture-of-experts layer on one rank: router, shared MLP, routing, experts.

The shared MLP runs before the experts, so that their last product can add its result to the sum: no kernel is launched
between that product and the next layer, and only the routing between the router's product and the experts'.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.triton.activations import activation_mul_quantize
from inferplane.kernels.triton.experts.moe import run_experts
from inferplane.kernels.triton.experts.moe_route import route_tokens
from inferplane.kernels.triton.linear import FP8_GROUP, activate_and_quantize, make_fp8_input, make_int8_input
from inferplane.kernels.triton.matmul import matmul
from inferplane.kernels.triton.matmul_input import MatmulInput, make_plain_input
from inferplane.kernels.triton.tiles import Products
from inferplane.kernels.triton.weight_packing import PLAIN, PackedWeight


def _down_projection(x: torch.Tensor, weight: PackedWeight, products: Products) -> torch.Tensor:
    """The second product of the shared MLP, `x weight^T`; for a plain weight by torch's own product."""
    if weight.kind == PLAIN:
        return F.linear(x, weight.data)
    return matmul(make_plain_input(x), weight, products)


def run_shared_mlp(x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, products: Products) -> torch.Tensor:
    """The shared gated MLP of `x` `[T, D]` with activations unquantized; plain weights go to torch's own product."""
    if gate_up.kind == PLAIN:
        return _down_projection(
            activation_mul_quantize(F.linear(x, gate_up.data), ahead=products.ahead)[0], down, products
        )
    return _down_projection(matmul(make_plain_input(x), gate_up, products, gate="silu"), down, products)


def run_shared_mlp_quantized(
    x: MatmulInput, gate_up: PackedWeight, down: PackedWeight, format: str, products: Products
) -> torch.Tensor:
    """The shared gated MLP with quantized activations `x`; those between the products are quantized to `format` ("fp8"
    or "int8") too.
    """
    return matmul(activate_and_quantize(matmul(x, gate_up, products), down, format, products), down, products)


def moe(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `moe` with activations unquantized."""
    products: Products = view.prepared
    logits = matmul(make_plain_input(x), view.router.weight, products, view.router.bias, torch.float32)
    shared = view.shared
    base = None if shared is None else run_shared_mlp(x, shared.gate_up.weight, shared.down.weight, products)
    routing = route_tokens(view.route, logits, products.ahead)
    return run_experts(view.experts, products, make_plain_input(x), *routing, base=base)


def moe_fp8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `moe` with activations in FP8, except the router's. Many rows are quantized once, for all experts and the
    shared MLP; few rows in each product.
    """
    products: Products = view.prepared
    logits = matmul(make_plain_input(x), view.router.weight, products, view.router.bias, torch.float32)
    rows, shared, base = make_fp8_input(x, view.experts.gate_up, FP8_GROUP, products), view.shared, None
    if shared is not None:
        gate_up, down = shared.gate_up.weight, shared.down.weight
        needs_own_input = rows.quantize or rows.scale is None or gate_up.static_scale is not None
        shared_rows = make_fp8_input(x, gate_up, FP8_GROUP, products) if needs_own_input else rows
        base = run_shared_mlp_quantized(shared_rows, gate_up, down, "fp8", products)
    return run_experts(view.experts, products, rows, *route_tokens(view.route, logits, products.ahead), "fp8", base)


def moe_int8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `moe` with activations in int8, except the router's; they are quantized once, for all experts and the
    shared MLP.
    """
    products: Products = view.prepared
    logits = matmul(make_plain_input(x), view.router.weight, products, view.router.bias, torch.float32)
    rows, shared, base = make_int8_input(x, products), view.shared, None
    if shared is not None:
        base = run_shared_mlp_quantized(rows, shared.gate_up.weight, shared.down.weight, "int8", products)
    return run_experts(view.experts, products, rows, *route_tokens(view.route, logits, products.ahead), "int8", base)
