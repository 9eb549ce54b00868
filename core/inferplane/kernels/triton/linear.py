"""Linear layers with quantized weights, and with quantized activations; the output head; the gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from inferplane.kernels.triton.handed import handed
from inferplane.kernels.triton.packed import FP8, Packed
from inferplane.kernels.triton.product import Activations, coded, plain, product
from inferplane.kernels.triton.rows import by_scale
from inferplane.kernels.triton.rows import gated as gate
from inferplane.kernels.triton.rows import quantize as quantized
from inferplane.kernels.triton.tiles import Products
from inferplane.types import Batch

FP8_GROUP = 128
FEW_ROWS = 64
"""So many are coded by the product itself, in each of its programs: a launch costs more than coding them again."""


def linear(p: Any, x: torch.Tensor) -> torch.Tensor:
    """One product; activations are quantized before it where the op says so."""
    rows = plain(x) if p.act is None else coded(*quantized(p.act, x), p.act_group, x.dtype)
    return product(rows, p.weight, p.prepared, p.bias, p.out_dtype)


def linear_fp8(p: Any, x: torch.Tensor) -> torch.Tensor:
    """The same with activations in FP8, which the op does not ask for."""
    rows = fp8_input(x, p.weight, p.weight.group, p.prepared.ahead)
    return product(rows, p.weight, p.prepared, p.bias, p.out_dtype)


def fp8_input(x: torch.Tensor, weight: Packed, group: int, ahead: bool = False) -> Activations:
    """Activations for a product in FP8: the codes that were handed over with them, or many are coded before it. Few
    others are coded in it, by 128 columns, where the weight is in FP8; beside INT4, which is multiplied in 16 bits, few
    stay as they are. A weight that brings a scale of its activations has them coded by that.
    """
    if weight.act_scale is not None:
        few = replace(plain(x), scale=weight.act_scale, code=True)
        return few if len(x) <= FEW_ROWS else coded(by_scale(x, weight.act_scale, ahead), weight.act_scale, 0, x.dtype)
    found = handed(x, "fp8", group) if weight.kind == FP8 else None
    if found is not None:
        return coded(*found, group, x.dtype)
    return replace(plain(x), code=weight.kind == FP8) if len(x) <= FEW_ROWS else fp8_rows(x, group)


def fp8_rows(x: torch.Tensor, group: int) -> Activations:
    """Activations in FP8: a scale for as many columns as share one in the weight, or for the row."""
    how = type("Rows", (), {"format": "fp8", "group": group})
    return coded(*quantized(how, x), group, x.dtype)


def lm_head(p: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Select rows, multiply, in float32 from the sums on."""
    rows = x if batch.logit_rows is None else x.index_select(0, batch.logit_rows)
    return product(plain(rows), p.weight, p.prepared, None, torch.float32)


def gated_mlp(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Two products; the first one's program has both halves of a column, and ends with their activation."""
    middle = product(plain(x), p.gate_up.weight, p.prepared, gated=True)
    return product(plain(middle), p.down.weight, p.prepared)


def gated_mlp_fp8(p: Any, x: torch.Tensor) -> torch.Tensor:
    """With activations in FP8; what lies between the two products is one kernel."""
    weight = p.gate_up.weight
    both = product(fp8_input(x, weight, weight.group, p.prepared.ahead), weight, p.prepared)
    return product(fp8_middle(both, p.down.weight, p.prepared), p.down.weight, p.prepared)


def fp8_middle(both: torch.Tensor, down: Packed, products: Products) -> Activations:
    """What the second product of a gated MLP takes, from the first one's result: coded as it is made, or by the scale
    that `down` brings.
    """
    if down.act_scale is not None:
        return fp8_input(gate(both, ahead=products.ahead)[0], down, 0, products.ahead)
    data, scale = gate(both, "fp8", FP8_GROUP, products.ahead)
    return coded(data, scale, FP8_GROUP, both.dtype)
