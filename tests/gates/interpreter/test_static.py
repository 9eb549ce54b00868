"""Static scales of activations: products quantize by the scale that their weight brings, and look for no maximum."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from inferplane.kernels.triton import linear
from inferplane.kernels.triton.experts.moe import moe_experts_fp8
from inferplane.kernels.triton.experts.moe_layer import moe_fp8
from inferplane.kernels.triton.linear import MAX_ROWS_QUANTIZED_IN_KERNEL, gated_mlp_fp8, linear_fp8
from inferplane.kernels.triton.quantized_results import QuantizedActivation, keep_quantized
from inferplane.kernels.triton.rowwise import quantize_rows
from inferplane.kernels.triton.weight_packing import pack
from inferplane.ops import MoERoute, SiluMul, encode
from inferplane.ops.op import relative_error
from tests.gates.interpreter.test_matrices import PRODUCTS

DEPTH, INNER, OUT = 200, 136, 72
LAST_PLACE = 2**-7
"""Of results and of what lies between two products, in bfloat16."""


def draw(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def scaled(scale, *shape):
    """A weight with one scale a row, and what is said of its activations: canonical, and packed."""
    q = replace(encode(draw(*shape) / shape[-1] ** 0.5, "fp8_row"), act_scale=torch.tensor([scale]))
    return q, pack(q)


def coded(x, scale):
    """The meaning: the nearest FP8 number to `x / scale`, none beyond the largest."""
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def mlp(x, gate_up, down, halves=torch.bfloat16):
    """In float32 but for what lies in memory between the products: both halves, unless the product ends with their
    activation, and that.
    """
    gate, up = F.linear(coded(x, gate_up.act_scale), gate_up.dequantize()).to(halves).float().chunk(2, -1)
    return F.linear(coded((F.silu(gate) * up).bfloat16(), down.act_scale), down.dequantize())


def near(got, want):
    assert relative_error(got.float(), want) < LAST_PLACE, relative_error(got.float(), want)


@pytest.fixture
def no_maximum(monkeypatch):
    """Nothing looks for the largest entry of a row before a product."""

    def quantized(*_):
        raise AssertionError("quantized by a scale found while running")

    monkeypatch.setattr(linear, "quantize_rows", quantized)


@pytest.mark.parametrize("count", [1, MAX_ROWS_QUANTIZED_IN_KERNEL, MAX_ROWS_QUANTIZED_IN_KERNEL + 1, 130])
@pytest.mark.parametrize("scale", [0.004, 0.02], ids=["cut off", "wide"])
def test_linear(scale, count, no_maximum, record_property):
    """Also with a scale too small for the largest entries, which become the largest number."""
    q, weight = scaled(scale, OUT, DEPTH)
    x = draw(count, DEPTH).bfloat16()
    assert (x.abs().max() > 448 * scale) == (scale == 0.004)
    op = SimpleNamespace(weight=weight, prepared=PRODUCTS, bias=None, out_dtype=torch.float32)
    got, want = linear_fp8(op, x), F.linear(coded(x, scale), q.dequantize())
    record_property("op", "linear")
    record_property("kernel", "triton_fp8:linear_fp8")
    record_property("error", float(relative_error(got, want)))
    record_property("tolerance", 1e-5)
    assert relative_error(got, want) < 1e-5
    keep_quantized(x, QuantizedActivation("fp8", 0, *quantize_rows(x, "fp8", 0)))
    assert torch.equal(linear_fp8(op, x), got), "another scale than the checkpoint's was used"


@pytest.mark.parametrize("count", [1, 80])
def test_gated_mlp(count, no_maximum, record_property):
    (q1, gate_up), (q2, down) = scaled(0.01, 2 * INNER, DEPTH), scaled(0.005, OUT, INNER)
    x = draw(count, DEPTH).bfloat16()
    op = SimpleNamespace(
        gate_up=SimpleNamespace(weight=gate_up), down=SimpleNamespace(weight=down), act=SiluMul(), prepared=PRODUCTS
    )
    record_property("op", "gated_mlp")
    record_property("kernel", "triton_fp8:gated_mlp_fp8")
    near(gated_mlp_fp8(op, x), mlp(x, q1, q2))


def experts(x, weights, ids, q1, q2):
    out = torch.zeros(len(x), OUT)
    for t in range(len(x)):
        for j, e in enumerate(ids[t].tolist()):
            one = [replace(q, data=q.data[e], scale=q.scale[e]) for q in (q1, q2)]
            out[t] += weights[t, j] * mlp(x[t : t + 1], *one, torch.float32)[0]
    return out


@pytest.mark.parametrize("count", [1, 5, 70])
def test_experts(count, no_maximum, record_property):
    (q1, gate_up), (q2, down) = scaled(0.01, 4, 2 * INNER, DEPTH), scaled(0.005, 4, OUT, INNER)
    x = draw(count, DEPTH).bfloat16()
    ids = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:2] for i in range(count)])
    weights = draw(count, 2).softmax(-1)
    op = SimpleNamespace(gate_up=gate_up, down=down, partial=False, prepared=PRODUCTS)
    record_property("op", "moe_experts")
    record_property("kernel", "triton_fp8:moe_experts_fp8")
    near(moe_experts_fp8(op, x, weights, ids), experts(x, weights, ids, q1, q2))


@pytest.mark.parametrize("count", [1, 70])
def test_a_mixture_whose_shared_mlp_has_scales_of_its_own(count, no_maximum, record_property):
    (q1, gate_up), (q2, down) = scaled(0.01, 4, 2 * INNER, DEPTH), scaled(0.005, 4, OUT, INNER)
    (s1, s_gate_up), (s2, s_down) = scaled(0.03, 2 * INNER, DEPTH), scaled(0.002, OUT, INNER)
    router = draw(4, DEPTH).bfloat16()
    route = MoERoute(None, 2, "softmax", 1, 1, "max", True, 1.0)
    op = SimpleNamespace(
        router=SimpleNamespace(weight=pack(router), bias=None),
        shared=SimpleNamespace(gate_up=SimpleNamespace(weight=s_gate_up), down=SimpleNamespace(weight=s_down)),
        experts=SimpleNamespace(gate_up=gate_up, down=down, partial=False),
        route=route,
        prepared=PRODUCTS,
    )
    x = draw(count, DEPTH).bfloat16()
    weights, ids = route(F.linear(x.float(), router.float()))
    record_property("op", "moe")
    record_property("kernel", "triton_fp8:moe_fp8")
    near(moe_fp8(op, x), experts(x, weights, ids, q1, q2) + mlp(x, s1, s2).bfloat16().float())
