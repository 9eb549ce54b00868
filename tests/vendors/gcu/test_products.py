"""Products that the ops' samples do not reach: zero points and biases, many experts, scores as they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inferplane.ops import OPS
from inferplane.ops.draw import Draw
from inferplane_gcu.kernels import moe
from tests.vendors.products import check_product
from tests.vendors.profile import narrow

pytestmark = narrow


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_weight_only(bias):
    check_product("gcu", torch.bfloat16, "vllm_gcu:linear_w8a16", "int8_row", bias)


@pytest.mark.parametrize("experts", [223, 224])
def test_either_alignment(experts):
    """The emulator takes each on its side of the border only."""
    draw = Draw(3, torch.bfloat16)
    x, gate_up, down = draw.normal(5, 32), draw.normal(experts, 48, 32) / 6, draw.normal(experts, 32, 24) / 5
    weights, ids = draw.uniform(5, 2, low=0.1), torch.tensor([[0, experts - 1], [7, 7 + experts // 2]] * 2 + [[5, 6]])
    got = moe.moe_experts(SimpleNamespace(gate_up=gate_up, down=down), x, weights, ids).float()
    h = torch.einsum("tkjd,td->tkj", gate_up[ids].float(), x.float())
    gate, up = h.chunk(2, -1)
    y = torch.einsum("tkdj,tkj->tkd", down[ids].float(), torch.nn.functional.silu(gate) * up)
    want = (y * weights[..., None]).sum(1)
    assert ((got - want).norm() / want.norm()).item() <= OPS["moe_experts"].tolerance[torch.bfloat16]


def test_softmax_scores_as_they_are():
    logits = Draw(4, torch.float32).normal(6, 16)
    weights, ids = moe.moe_route(SimpleNamespace(top_k=3, renormalize=False, factor=2.0), logits)
    want = logits.softmax(-1).gather(1, ids.long()) * 2.0
    assert torch.allclose(weights, want) and (weights.sum(-1) < 2.0).all()
    assert torch.equal(ids.long().sort()[0], logits.topk(3, -1)[1].sort()[0])
