"""Calls of matrix kernels, by name: few and many rows, each pair of forms, experts dealt and weighted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from inferplane.kernels.triton import Products

PRODUCTS: dict[str, Callable[[Products], Any]] = {}


def specimen(name: str) -> Callable[[Any], Any]:
    def add(call: Any) -> Any:
        PRODUCTS[name] = call
        return call

    return add


DEPTH = 2048
COLUMNS = 512


def _packed(format: str, *shape: int) -> Any:
    from inferplane.kernels.triton.weight_packing import pack
    from inferplane.ops.formats import encode

    weight = torch.zeros(*shape, dtype=torch.bfloat16)
    return pack(weight if format == "plain" else encode(weight, format))


def _product(products: Products, rows: int, format: str, act: str) -> None:
    from inferplane.kernels.triton.matmul import matmul
    from inferplane.kernels.triton.matmul_input import make_plain_input, make_quantized_input

    x = replace(make_plain_input(torch.empty(rows, DEPTH, dtype=torch.bfloat16)), quantize=act == "here")
    if act in ("fp8", "int8"):
        group = 128 if act == "fp8" else 0
        scales = torch.empty(rows, DEPTH // 128 if group else 1)
        kind = torch.uint8 if act == "fp8" else torch.int8
        x = make_quantized_input(torch.empty(rows, DEPTH, dtype=kind), scales, group, torch.bfloat16)
    matmul(x, _packed(format, COLUMNS, DEPTH), products)


FORMS = {"fp8_fp8": ("fp8_block", "fp8"), "coded_fp8": ("fp8_block", "here"), "int8_int8": ("int8_row", "int8"),
         "bf16_mxfp4": ("mxfp4", ""), "bf16_nvfp4": ("nvfp4", ""),
         "bf16_fp8": ("fp8_block", ""), "bf16_int8": ("int8_group", ""), "bf16_int4": ("int4_group", ""),
         "fp8_int4": ("int4_group64", "fp8"), "coded_int4": ("int4_group64", "here")}  # fmt: skip


def _specimen(form: str, rows: int, programs: int = 1) -> None:
    name = f"product_{form}_{rows}" + ("_split" if programs > 1 else "")
    PRODUCTS[name] = lambda products: _product(replace(products, programs=programs), rows, *FORMS[form])


for _form, _rows in (("fp8_fp8", 256), ("int8_int8", 256), ("bf16_fp8", 256), ("bf16_int8", 1), ("bf16_int4", 256)):
    _specimen(_form, _rows)
_specimen("fp8_fp8", 1, 64)
_specimen("coded_fp8", 1)
_specimen("coded_fp8", 64)
_specimen("bf16_int4", 1, 64)
_specimen("bf16_mxfp4", 1, 64)
_specimen("bf16_mxfp4", 256)
_specimen("bf16_nvfp4", 1, 64)
_specimen("bf16_nvfp4", 256)
_specimen("int8_int8", 1, 64)
_specimen("fp8_int4", 1, 64)
_specimen("fp8_int4", 256)
_specimen("coded_int4", 1)
_specimen("coded_int4", 64)


def _grouped(
    products: Products, rows: int, format: str, act: str = "", *, quantize: str = "", last: bool = False
) -> None:
    """The first product over experts, which deals with few rows, or with `last` the second one, which sums up; `act` as
    in `FORMS`.
    """
    from inferplane.kernels.triton.experts.moe import GroupedResult, PairSum, multiply_grouped
    from inferplane.kernels.triton.matmul_input import make_plain_input, make_quantized_input

    how, weight = products.choose_for_experts(rows), _packed(format, 8, 512, DEPTH)
    rest = torch.empty(64, DEPTH, dtype=torch.bfloat16)
    slots = torch.empty(8 * how.rows, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    x = replace(make_plain_input(rest), quantize=act == "here")
    if act in ("fp8", "int8"):
        group = 128 if act == "fp8" or last else 0
        kind = torch.uint8 if act == "fp8" else torch.int8
        scales = torch.empty(64, DEPTH // 128 if group else 1)
        x = make_quantized_input(torch.empty(64, DEPTH, dtype=kind), scales, group, torch.bfloat16)
    few = rows == 1 and not last
    result = GroupedResult(
        gated=not last,
        quantize=quantize,
        weights=torch.empty(256) if last else None,
        pair_sum=PairSum(products.counters, 4, rest) if last else None,
    )
    multiply_grouped(
        x, weight, slots, how, result, pairs=256, top_k=0 if last else 4, fp8=products.fp8, ahead=products.ahead,
        assign_from=torch.zeros(64, 4, dtype=torch.int64) if few else None,
    )  # fmt: skip


PRODUCTS["experts_bf16"] = lambda products: _grouped(products, 1, "plain")
PRODUCTS["experts_bf16_int4"] = lambda products: _grouped(products, 1, "int4_group64")
PRODUCTS["experts_bf16_nvfp4"] = lambda products: _grouped(products, 1, "nvfp4")
PRODUCTS["experts_fp8_few"] = lambda products: _grouped(products, 1, "fp8_block", "here", quantize="fp8")
PRODUCTS["experts_fp8_some"] = lambda products: _grouped(products, 256, "fp8_block", "here", quantize="fp8")
PRODUCTS["experts_fp8_many"] = lambda products: _grouped(products, 256, "fp8_block", "fp8", quantize="fp8")
PRODUCTS["experts_fp8_down"] = lambda products: _grouped(products, 1, "fp8_block", "fp8", last=True)
PRODUCTS["experts_fp8_int4_coded"] = lambda products: _grouped(products, 1, "int4_group64", "here", quantize="fp8")


def _clamped(products: Products, rows: int, format: str, *, last: bool = False) -> None:
    """A product over experts with biases, the first one with a clamped gate, at gpt-oss's width."""
    from inferplane.kernels.triton.experts.moe import GroupedResult, PairSum, multiply_grouped
    from inferplane.kernels.triton.matmul_input import make_plain_input

    how, rest = products.choose_for_experts(rows), torch.empty(64, 2880, dtype=torch.bfloat16)
    slots = torch.empty(8 * how.rows, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    bias = torch.empty(8, 512, dtype=torch.bfloat16)
    first = GroupedResult(bias=bias, clamp=(1.702, 7.0))
    second = GroupedResult(weights=torch.empty(256), pair_sum=PairSum(products.counters, 4), bias=bias)
    multiply_grouped(
        make_plain_input(rest), _packed(format, 8, 512, 2880), slots, how, second if last else first, pairs=256,
        top_k=0 if last else 4, fp8=products.fp8, assign_from=None if last or rows > 1 else torch.zeros(64, 4).long(),
    )  # fmt: skip


for _format, _name in (("plain", "clamped"), ("mxfp4", "clamped_mxfp4")):
    PRODUCTS[f"experts_{_name}_few"] = lambda products, f=_format: _clamped(products, 1, f)
    PRODUCTS[f"experts_{_name}_many"] = lambda products, f=_format: _clamped(products, 256, f)
    PRODUCTS[f"experts_{_name}_down"] = lambda products, f=_format: _clamped(products, 1, f, last=True)


def _experts(pair: str, form: str, rows: int) -> None:
    """Both products of experts with coded activations, the first one's result coded alike."""
    format, act = FORMS[pair]
    PRODUCTS[f"experts_{pair}_{form}"] = lambda products: _grouped(products, rows, format, act, quantize=act)
    PRODUCTS[f"experts_{pair}_down_{form}"] = lambda products: _grouped(products, rows, format, act, last=True)


for _pair in ("fp8_int4", "int8_int8"):
    _experts(_pair, "few", 1)
    _experts(_pair, "many", 256)


@specimen("product_coded_static_1")
def _(products: Products) -> None:
    _static(products, 1)


@specimen("product_coded_static_256")
def _(products: Products) -> None:
    _static(products, 256)


def _static(products: Products, rows: int) -> None:
    """Activations by the scale that the weight brings: coded in the product, and before it."""
    from inferplane.kernels.triton.linear import make_fp8_input
    from inferplane.kernels.triton.matmul import matmul

    weight = replace(_packed("fp8_row", COLUMNS, DEPTH), act_scale=torch.ones(1))
    matmul(make_fp8_input(torch.empty(rows, DEPTH, dtype=torch.bfloat16), weight, 0, products), weight, products)


def _gated(products: Products, rows: int, gate: str = "silu", format: str = "fp8_block") -> None:
    from inferplane.kernels.triton.matmul import matmul
    from inferplane.kernels.triton.matmul_input import make_plain_input

    x = make_plain_input(torch.empty(rows, DEPTH, dtype=torch.bfloat16))
    matmul(x, _packed(format, 1024, DEPTH), products, gate=gate)


PRODUCTS["product_bf16_fp8_gated"] = lambda products: _gated(products, 256)
PRODUCTS["product_bf16_int4_gelu_gated"] = lambda products: _gated(products, 1, "gelu_tanh", "int4_group64")
PRODUCTS["product_bf16_fp8_gated_ahead"] = lambda products: _gated(replace(products, ahead=True), 1)


def _ahead(name: str) -> None:
    """The same, launched before what is in front of it has ended."""
    call = PRODUCTS[name]
    PRODUCTS[f"{name}_ahead"] = lambda products: call(replace(products, ahead=True))


for _name in ("product_fp8_fp8_256", "product_fp8_fp8_1_split", "product_coded_fp8_1", "product_bf16_int4_1_split",
              "experts_fp8_few", "experts_fp8_down"):  # fmt: skip
    _ahead(_name)


@specimen("experts_dealt")
def _(products: Products) -> None:
    from inferplane.kernels.triton.experts.blocks import assign_blocks

    assign_blocks(torch.zeros(2, 8, dtype=torch.int64), 256, 16)


@specimen("moe_route")
def _(products: Products) -> None:
    from inferplane.kernels.triton.experts.moe_route import moe_route

    op = SimpleNamespace(
        bias=torch.zeros(256), top_k=8, score="sigmoid", groups=8, top_groups=4, group_score="top2", renormalize=True,
        factor=2.5, least_sum=0.0, sum_eps=0.0,
    )  # fmt: skip
    moe_route(op, torch.zeros(2, 256))


@specimen("hopper_product")
def _(products: Products) -> None:
    _hopper_product(8192)


@specimen("hopper_product_narrow")
def _(products: Products) -> None:
    _hopper_product(1024)


def _hopper_product(rows: int) -> None:
    from inferplane.kernels.triton.matmul_input import make_quantized_input
    from inferplane_cuda.kernels.hopper.linear import matmul_fp8_blocks

    x = make_quantized_input(
        torch.empty(rows, DEPTH, dtype=torch.uint8), torch.empty(rows, DEPTH // 128), 128, torch.bfloat16
    )
    matmul_fp8_blocks(x, _packed("fp8_block", COLUMNS, DEPTH), None)


@specimen("hopper_experts")
def _(products: Products) -> None:
    _hopper_experts(weighted=False)


@specimen("hopper_experts_down")
def _(products: Products) -> None:
    _hopper_experts(weighted=True)


def _hopper_experts(*, weighted: bool) -> None:
    from inferplane.kernels.triton.matmul_input import make_quantized_input
    from inferplane_cuda.kernels.hopper.experts import gather_pairs, multiply_grouped

    dealing = torch.empty(8 * 128, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    x = make_quantized_input(
        torch.empty(64, DEPTH, dtype=torch.uint8), torch.empty(64, DEPTH // 128), 128, torch.bfloat16
    )
    rows = gather_pairs(x, dealing, 8, 512)
    multiply_grouped(
        rows, _packed("fp8_block", 8, COLUMNS, DEPTH), dealing, 512, torch.empty(512) if weighted else None
    )
