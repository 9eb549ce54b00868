"""Linear layers with quantized weights, and with quantized activations; the output head; the gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from inferplane.kernels.triton.activations import MAX_QUANTIZED_COLUMNS, activation_mul_quantize, function_of
from inferplane.kernels.triton.fp8_int4 import is_multiplied_in_fp8
from inferplane.kernels.triton.matmul import matmul
from inferplane.kernels.triton.matmul_input import MatmulInput, make_plain_input, make_quantized_input
from inferplane.kernels.triton.quantized_results import find_quantized
from inferplane.kernels.triton.rowwise import quantize_by_scale, quantize_rows
from inferplane.kernels.triton.tiles import Products
from inferplane.kernels.triton.weight_packing import FP8, PackedWeight
from inferplane.types import Batch

FP8_GROUP = 128
"""Columns of activations in FP8 that share a scale."""
MAX_ROWS_QUANTIZED_IN_KERNEL = 64
"""Up to this many rows, the matmul quantizes activations itself: redoing it per program is cheaper than a launch."""


def linear(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `linear` by one matrix product. With `Linear.activation_quant`, activations are quantized before it; the
    quantized form that the kernel before left is used if there is one.
    """
    act, rows = view.activation_quant, make_plain_input(x)
    if act is not None:
        rows = make_quantized_input(*quantize_rows(x, act.format, act.group), view.activation_group, x.dtype)
    return matmul(rows, view.weight, view.prepared, view.bias, view.out_dtype)


def linear_fp8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `linear` with activations quantized to FP8, although the op passes them unquantized: faster, and less
    exact by `FP8_ERROR`.
    """
    rows = make_fp8_input(x, view.weight, activation_group(view.weight), view.prepared)
    return matmul(rows, view.weight, view.prepared, view.bias, view.out_dtype)


def linear_int8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `linear` with activations quantized to int8, one scale per token, although the op passes them unquantized:
    faster, and less exact by `INT8_ERROR`.
    """
    return matmul(make_int8_input(x, view.prepared), view.weight, view.prepared, view.bias, view.out_dtype)


def activation_group(weight: PackedWeight) -> int:
    """How many columns of FP8 activations share a scale before this weight: `FP8_GROUP`, but 0 (the whole row) where
    the weight is FP8 with a scale per row.
    """
    return weight.group if weight.kind == FP8 else FP8_GROUP


def make_fp8_input(x: torch.Tensor, weight: PackedWeight, group: int, products: Products) -> MatmulInput:
    """Choose where activations become FP8 for a product, and quantize them here if it is before the product.

    In this order:
        1. The weight brings a static scale: that scale is used, in the product for few rows, else by a kernel here.
        2. The kernel that computed `x` left its FP8 form: it is used.
        3. More than `MAX_ROWS_QUANTIZED_IN_KERNEL` rows: a kernel quantizes them here.
        4. Few rows: the product quantizes them, one scale per loop iteration's columns, if it multiplies FP8 numbers;
           if it multiplies INT4 weights in 16 bits, they stay as they are.

    Args:
        x: `[M, K]` in 16 bits.
        weight: what they are multiplied by.
        group: columns that share a scale, 0 for the whole row.
        products: tile sizes, and whether the device multiplies FP8 numbers.
    """
    is_few = len(x) <= MAX_ROWS_QUANTIZED_IN_KERNEL
    static = weight.static_scale
    if static is not None:
        if is_few:
            return replace(make_plain_input(x), scale=static, quantize=True)
        return make_quantized_input(quantize_by_scale(x, static, products.ahead), static, 0, x.dtype)
    found = find_quantized(x, "fp8", group)
    if found is not None:
        return make_quantized_input(found.values, found.scales, group, x.dtype)
    if not is_few:
        return quantize_rows_to_fp8(x, group)
    return replace(make_plain_input(x), quantize=weight.kind == FP8 or (products.fp8 and is_multiplied_in_fp8(weight)))


def quantize_rows_to_fp8(x: torch.Tensor, group: int) -> MatmulInput:
    """Rows `[M, K]` in FP8 as the left operand of a product, with a scale per `group` columns, or per row if `group` is
    0. Launches a kernel, unless the one that computed `x` left this form.
    """
    return make_quantized_input(*quantize_rows(x, "fp8", group), group, x.dtype)


def make_int8_input(x: torch.Tensor, products: Products) -> MatmulInput:
    """Rows `[M, K]` in int8 with a scale per row as the left operand of a product: the form that the kernel before
    left, or else quantized here by a launch.

    Few rows are quantized here too, not in the product: a row's scale needs all of its columns.
    """
    return make_quantized_input(*quantize_rows(x, "int8", 0, products.ahead), 0, x.dtype)


def lm_head(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The op `lm_head`, logits float32 `[R, V]`: select the rows that need some, multiply; the sums are not rounded."""
    rows = x if batch.logit_rows is None else x.index_select(0, batch.logit_rows)
    return matmul(make_plain_input(rows), view.weight, view.prepared, None, torch.float32)


def gated_mlp(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `gated_mlp` by two products, activations unquantized; a program of the first computes gate and up of its
    columns, and ends with `f(gate) * up`.
    """
    inner = matmul(make_plain_input(x), view.gate_up.weight, view.prepared, gate=function_of(view.act))
    return matmul(make_plain_input(inner), view.down.weight, view.prepared)


def gated_mlp_fp8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `gated_mlp` with activations in FP8: product, one kernel that activates and quantizes, product."""
    gate_up, down, products = view.gate_up.weight, view.down.weight, view.prepared
    both = matmul(make_fp8_input(x, gate_up, activation_group(gate_up), products), gate_up, products)
    return matmul(activate_and_quantize(both, down, "fp8", products, function_of(view.act)), down, products)


def gated_mlp_int8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `gated_mlp` with activations in int8: product, one kernel that activates and quantizes, product."""
    gate_up, down, products = view.gate_up.weight, view.down.weight, view.prepared
    both = matmul(make_int8_input(x, products), gate_up, products)
    return matmul(activate_and_quantize(both, down, "int8", products, function_of(view.act)), down, products)


def activate_and_quantize(
    both: torch.Tensor, down: PackedWeight, format: str, products: Products, function: str = "silu"
) -> MatmulInput:
    """The input of a gated MLP's second product: `f(gate) * up`, quantized in the same kernel.

    FP8 has a scale per 128 columns, or the static scale that `down` brings; int8 has one per row where a program can
    hold the row.

    Args:
        both: gate and up side by side, `[M, 2 I]`.
        down: the second weight.
        format: "fp8" or "int8".
        products: tile sizes.
        function: f, the activation function.
    """
    if format == "fp8" and down.static_scale is not None:
        return make_fp8_input(
            activation_mul_quantize(both, ahead=products.ahead, function=function)[0], down, 0, products
        )
    group = 0 if format == "int8" and both.shape[1] // 2 <= MAX_QUANTIZED_COLUMNS else FP8_GROUP
    values, scales = activation_mul_quantize(both, format, group, products.ahead, function)
    return make_quantized_input(values, scales, group, both.dtype)
