"""A mixture-of-experts layer whole, on one rank: router, the shared MLP, routing, and experts that end with the sum.

The shared MLP comes before the experts, so that their last product can add it to what it sums up: no kernel stands
between that product and whatever follows the layer, and only routing between the router's product and the experts'.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.triton.linear import FP8_GROUP, fp8_input, int8_input, middle, static_of
from inferplane.kernels.triton.matmul import Activations, plain, product
from inferplane.kernels.triton.moe import experts
from inferplane.kernels.triton.moe_route import routed
from inferplane.kernels.triton.rowwise import gated as gate
from inferplane.kernels.triton.tiles import Products
from inferplane.kernels.triton.weight_packing import PLAIN, Packed


def _down(x: torch.Tensor, weight: Packed, products: Products) -> torch.Tensor:
    if weight.kind == PLAIN:
        return F.linear(x, weight.data)
    return product(plain(x), weight, products)


def shared_mlp(x: torch.Tensor, gate_up: Packed, down: Packed, products: Products) -> torch.Tensor:
    """A gated MLP; plain weights go to torch's own product."""
    if gate_up.kind == PLAIN:
        return _down(gate(F.linear(x, gate_up.data), ahead=products.ahead)[0], down, products)
    return _down(product(plain(x), gate_up, products, gated=True), down, products)


def shared_mlp_coded(x: Activations, gate_up: Packed, down: Packed, format: str, products: Products) -> torch.Tensor:
    """The same with coded activations, those between the products too."""
    return product(middle(product(x, gate_up, products), down, format, products), down, products)


def moe(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Activations as they are."""
    products: Products = p.prepared
    logits = product(plain(x), p.router.weight, products, p.router.bias, torch.float32)
    shared = p.shared
    base = None if shared is None else shared_mlp(x, shared.gate_up.weight, shared.down.weight, products)
    return experts(p.experts, products, plain(x), *routed(p.route, logits, products.ahead), base=base)


def moe_fp8(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Activations in FP8 but for the router's; many that come in are coded once for all."""
    products: Products = p.prepared
    logits = product(plain(x), p.router.weight, products, p.router.bias, torch.float32)
    rows, shared, base = fp8_input(x, p.experts.gate_up, FP8_GROUP, products), p.shared, None
    if shared is not None:
        gate_up, down = shared.gate_up.weight, shared.down.weight
        own = rows.code or rows.scale is None or static_of(gate_up) is not None
        into = fp8_input(x, gate_up, FP8_GROUP, products) if own else rows
        base = shared_mlp_coded(into, gate_up, down, "fp8", products)
    return experts(p.experts, products, rows, *routed(p.route, logits, products.ahead), "fp8", base)


def moe_int8(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Activations in int8 but for the router's, coded once for all."""
    products: Products = p.prepared
    logits = product(plain(x), p.router.weight, products, p.router.bias, torch.float32)
    rows, shared, base = int8_input(x, products), p.shared, None
    if shared is not None:
        base = shared_mlp_coded(rows, shared.gate_up.weight, shared.down.weight, "int8", products)
    return experts(p.experts, products, rows, *routed(p.route, logits, products.ahead), "int8", base)
