"""Products that the ops' samples do not reach: zero points and biases, many experts, scores as they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inferplane.ops.draw import Draw
from inferplane_gcu.kernels import moe
from tests.vendors.products import check_experts, check_product, check_scores_as_they_are
from tests.vendors.profile import in_vendor_dtypes

pytestmark = in_vendor_dtypes


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_weight_only(bias):
    check_product("gcu", torch.bfloat16, "vllm_gcu:linear_w8a16", "int8_row", bias)


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
