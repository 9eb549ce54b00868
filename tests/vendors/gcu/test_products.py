"""Products that the ops' samples do not reach: zero points and biases, many experts, scores as they are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inferplane.ops.draw import Draw
from inferplane.ops.formats import encode
from inferplane_gcu.kernels import int4, moe
from tests.vendors.products import check_experts, check_product, check_scores_as_they_are
from tests.vendors.profile import in_vendor_dtypes

pytestmark = in_vendor_dtypes


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(
    ("kernel", "format"),
    [
        ("vllm_gcu:linear_w8a16", "int8_row"),
        ("vllm_gcu:linear_w8a8", "int8_row"),
        ("vllm_gcu:linear_w4a16", "int4_group"),
        ("vllm_gcu:linear_w4a16", "int4_group64"),
    ],
)
def test_weight_only(kernel, format, bias):
    check_product("gcu", torch.bfloat16, kernel, format, bias)


def test_experts_with_zero_points():
    draw = Draw(5, torch.bfloat16)
    x, weights, ids = draw.normal(6, 128), draw.uniform(6, 2, low=0.1), torch.tensor([[0, 2], [1, 3], [3, 0]] * 2)
    stacks = [encode(draw.normal(4, n, 128) / 11, "int4_group64") for n in (256, 128)]
    stacks = [replace(w, zero=draw.ints(*w.scale.shape, below=5).float() - 2) for w in stacks]
    kernel = int4.moe_experts_w4a16
    got = kernel(
        SimpleNamespace(**dict(zip(("gate_up", "down"), map(int4.EXPERTS_PACKED.fn, stacks)))), x, weights, ids
    )
    check_experts(got, x, *(w.dequantize() for w in stacks), weights, ids)


@pytest.mark.parametrize("experts", [223, 224])
def test_either_alignment(experts):
    """The emulator takes each on its side of the border only."""
    draw = Draw(3, torch.bfloat16)
    x, gate_up, down = draw.normal(5, 32), draw.normal(experts, 48, 32) / 6, draw.normal(experts, 32, 24) / 5
    weights, ids = draw.uniform(5, 2, low=0.1), torch.tensor([[0, experts - 1], [7, 7 + experts // 2]] * 2 + [[5, 6]])
    got = moe.moe_experts(SimpleNamespace(gate_up=gate_up, down=down), x, weights, ids)
    check_experts(got, x, gate_up, down, weights, ids)


def test_softmax_scores_as_they_are():
    check_scores_as_they_are(moe.moe_route)
