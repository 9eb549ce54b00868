"""What the ops' samples do not reach: zero points, biases, rows in FP8, scores by sigmoid, odd numbers of experts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inferplane.ops import OPS
from inferplane.ops.draw import Draw
from inferplane.ops.moe import MoERoute
from inferplane.ops.quantize import encode
from inferplane_xpu.intel.kernels import moe, products
from tests.vendors.intel import chip
from tests.vendors.quantized import check_product

pytestmark = pytest.mark.skipif(chip.LIFTED, reason="in the vendor's dtypes: without INFERPLANE_EMULATED_FLOAT32")
INT4 = ("int4_group", "int4_group64", "int4_group32", "int4_row")


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("kernel", ["vllm_xpu:linear_int4", "torch_xpu:linear_int4pack"])
@pytest.mark.parametrize("format", INT4)
def test_int4(kernel, format, bias):
    check_product("xpu:intel", torch.bfloat16, kernel, format, bias)


@pytest.mark.parametrize("pack", [products.ONEDNN, products.TORCH_XPU], ids=["onednn", "torch"])
@pytest.mark.parametrize("zero", ["whole", "broken", "far"])
def test_zero_points_of_int4(pack, zero):
    """Whole ones from -8 to 7 go into the operator; others are taken off behind it."""
    draw = Draw(8, torch.bfloat16)
    weight = encode(draw.normal(48, 256) / 16, "int4_group64")
    points = draw.ints(*weight.scale.shape, below=15).float() - 7
    points = {"whole": points, "broken": points + 0.5, "far": points * 3}[zero]
    weight = replace(weight, zero=points)
    packed, x = pack.fn(weight), draw.normal(5, 256)
    assert (packed.shift is None) == (zero == "whole")
    kernel = products.linear_int4 if pack is products.ONEDNN else products.linear_int4pack
    got = kernel(SimpleNamespace(weight=packed, bias=None), x).float()
    want = x.float() @ weight.dequantize().t()
    assert ((got - want).norm() / want.norm()).item() <= OPS["linear"].tolerance[torch.bfloat16]


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_int8_and_fp8_rows(bias):
    check_product("xpu:intel", torch.bfloat16, "torch_xpu:linear_int8pack", "int8_row", bias)
    check_product("xpu:intel", torch.bfloat16, "vllm_xpu:linear_fp8", "fp8_row", bias)


@pytest.mark.parametrize("k", [3, 9])
def test_numbers_of_experts_that_were_not_compiled(k):
    """A token's first expert fills up, with weight 0."""
    draw = Draw(3, torch.bfloat16)
    x, gate_up, down = draw.normal(5, 32), draw.normal(12, 48, 32) / 6, draw.normal(12, 32, 24) / 5
    weights = draw.uniform(5, k, low=0.1)
    ids = torch.stack([torch.tensor(draw.permutation(12)[:k]) for _ in range(5)])
    stacks = SimpleNamespace(gate_up=moe.EXPERTS.fn(gate_up), down=moe.EXPERTS.fn(down))
    got = moe.moe_experts(stacks, x, weights, ids).float()
    gate, up = torch.einsum("tkjd,td->tkj", gate_up[ids].float(), x.float()).chunk(2, -1)
    y = torch.einsum("tkdj,tkj->tkd", down[ids].float(), torch.nn.functional.silu(gate) * up)
    want = (y * weights[..., None]).sum(1)
    assert ((got - want).norm() / want.norm()).item() <= OPS["moe_experts"].tolerance[torch.bfloat16]


@pytest.mark.parametrize("zero", [False, True], ids=["symmetric", "zero_points"])
def test_experts_in_int4(zero):
    """Zero points, which the product does not know, are dealt with by expanding the stack."""
    draw = Draw(5, torch.bfloat16)
    stacks = {"gate_up": draw.normal(4, 256, 128) / 8, "down": draw.normal(4, 128, 128) / 8}
    quantized = {name: encode(w, "int4_group64") for name, w in stacks.items()}
    if zero:
        quantized = {n: replace(q, zero=draw.ints(*q.scale.shape, below=5).float() - 2) for n, q in quantized.items()}
    packed = {name: moe.INT4_EXPERTS.fn(q) for name, q in quantized.items()}
    x, weights, ids = draw.normal(3, 128), draw.uniform(3, 2, low=0.1), torch.tensor([[0, 3], [1, 2], [3, 1]])
    got = moe.moe_experts_int4(SimpleNamespace(**packed), x, weights, ids).float()
    op = SimpleNamespace(**quantized, partial=False)
    want = OPS["moe_experts"].__call__(op, x, weights, ids).float()
    assert ((got - want).norm() / want.norm()).item() <= OPS["moe_experts"].tolerance[torch.bfloat16]


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(("score", "groups"), [("sigmoid", 1), ("sigmoid", 4), ("softmax", 4)])
def test_scores(score, groups, bias):
    draw = Draw(4, torch.float32)
    values = draw.normal(16) / 10 if bias else None
    op = MoERoute(values, 3, score, groups, 2, "top2", renormalize=not bias, factor=2.5)
    logits = draw.normal(6, 16)
    want, ids = op(logits)
    route = moe.moe_route if groups == 1 else moe.moe_route_grouped
    weights, found = route(op, logits)
    order, order0 = found.long().argsort(-1), ids.argsort(-1)
    assert torch.equal(found.long().gather(1, order), ids.gather(1, order0))
    assert torch.allclose(weights.gather(1, order), want.gather(1, order0), atol=1e-6)
