"""Linear layers with quantized weights, and with quantized activations; the output head; the gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from inferplane.kernels.triton.fp8_int4 import in_fp8
from inferplane.kernels.triton.matmul import Activations, coded, plain, product
from inferplane.kernels.triton.quantized_results import handed
from inferplane.kernels.triton.rowwise import MOST_COLUMNS, by_scale
from inferplane.kernels.triton.rowwise import gated as gate
from inferplane.kernels.triton.rowwise import quantize as quantized
from inferplane.kernels.triton.tiles import Products
from inferplane.kernels.triton.weight_packing import FP8, Packed
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
    rows = fp8_input(x, p.weight, group_of(p.weight), p.prepared)
    return product(rows, p.weight, p.prepared, p.bias, p.out_dtype)


def linear_int8(p: Any, x: torch.Tensor) -> torch.Tensor:
    """The same with activations in int8, a scale a token."""
    return product(int8_input(x, p.prepared), p.weight, p.prepared, p.bias, p.out_dtype)


def group_of(weight: Packed) -> int:
    """Columns that share a scale in activations in FP8: 0, the whole row, beside FP8 weights with a scale a row."""
    return weight.group if weight.kind == FP8 else FP8_GROUP


def static_of(weight: Packed) -> torch.Tensor | None:
    """The scale of its activations that an FP8 weight brings, or None."""
    return weight.act_scale if weight.kind == FP8 else None


def fp8_input(x: torch.Tensor, weight: Packed, group: int, products: Products) -> Activations:
    """Activations for a product in FP8: the codes that were handed over with them, or many are coded before it. Few
    others are coded in it, by as many columns as a loop turn takes, where it multiplies FP8 numbers; where INT4 is
    multiplied in 16 bits, few stay as they are. An FP8 weight that brings a scale of its activations has them coded by
    that.
    """
    static = static_of(weight)
    if static is not None:
        few = replace(plain(x), scale=static, code=True)
        return few if len(x) <= FEW_ROWS else coded(by_scale(x, static, products.ahead), static, 0, x.dtype)
    found = handed(x, "fp8", group)
    if found is not None:
        return coded(*found, group, x.dtype)
    here = weight.kind == FP8 or (products.fp8 and in_fp8(weight))
    return replace(plain(x), code=here) if len(x) <= FEW_ROWS else fp8_rows(x, group)


def fp8_rows(x: torch.Tensor, group: int) -> Activations:
    """Activations in FP8: a scale for as many columns as share one in the weight, or for the row."""
    how = type("Rows", (), {"format": "fp8", "group": group})
    return coded(*quantized(how, x), group, x.dtype)


def int8_input(x: torch.Tensor, products: Products) -> Activations:
    """Activations in int8 with a scale a row: the codes that were handed over with them, or coded before the product,
    few too, since a row's scale follows from all of its columns.
    """
    how = type("Rows", (), {"format": "int8", "group": 0, "prepared": products})
    return coded(*quantized(how, x), 0, x.dtype)


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
    both = product(fp8_input(x, weight, group_of(weight), p.prepared), weight, p.prepared)
    return product(middle(both, p.down.weight, "fp8", p.prepared), p.down.weight, p.prepared)


def gated_mlp_int8(p: Any, x: torch.Tensor) -> torch.Tensor:
    """The same in int8."""
    both = product(int8_input(x, p.prepared), p.gate_up.weight, p.prepared)
    return product(middle(both, p.down.weight, "int8", p.prepared), p.down.weight, p.prepared)


def middle(both: torch.Tensor, down: Packed, format: str, products: Products) -> Activations:
    """What the second product of a gated MLP takes, from the first one's result: coded as it is made, in FP8 by 128
    columns, in int8 by rows where a program holds one; or in FP8 by the scale that `down` brings.
    """
    if format == "fp8" and static_of(down) is not None:
        return fp8_input(gate(both, ahead=products.ahead)[0], down, 0, products)
    group = 0 if format == "int8" and both.shape[1] // 2 <= MOST_COLUMNS else FP8_GROUP
    data, scale = gate(both, format, group, products.ahead)
    return coded(data, scale, group, both.dtype)
