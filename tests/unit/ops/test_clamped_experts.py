"""Clamped experts against the formula, entry by entry in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inferplane.kernels.composed.moe import clamped_experts
from inferplane.ops import ClampedExperts


@pytest.mark.parametrize(("alpha", "limit"), [(1.702, 7.0), (1.0, 0.5)])
@pytest.mark.parametrize("with_down_bias", [True, False])
def test_clamped_experts(alpha, limit, with_down_bias):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    gate_up, gate_up_bias, down = draw(3, 10, 6), draw(3, 10), draw(3, 6, 5)
    down_bias = draw(3, 6) if with_down_bias else None
    x, weights, ids = draw(4, 6), torch.rand(4, 2, generator=g), torch.tensor([[0, 2], [2, 1], [-1, 2], [1, 0]])
    want = torch.zeros(4, 6, dtype=torch.float64)
    for t in range(4):
        for weight, e in zip(weights[t].double(), ids[t].tolist()):
            if e < 0:
                continue
            h = torch.zeros(5, dtype=torch.float64)
            for i in range(5):
                gate = float(gate_up[e, 2 * i].double() @ x[t].double() + gate_up_bias[e, 2 * i])
                up = float(gate_up[e, 2 * i + 1].double() @ x[t].double() + gate_up_bias[e, 2 * i + 1])
                gate, up = min(gate, limit), min(max(up, -limit), limit)
                h[i] = (up + 1) * gate / (1 + torch.exp(torch.tensor(-alpha * gate, dtype=torch.float64)))
            y = down[e].double() @ h
            want[t] += weight * (y if down_bias is None else y + down_bias[e])
    op = ClampedExperts(gate_up, gate_up_bias, down, down_bias, alpha, limit, partial=True)
    view = SimpleNamespace(
        gate_up=gate_up, gate_up_bias=gate_up_bias, down=down, down_bias=down_bias, alpha=alpha, limit=limit
    )
    for got in (op(x, weights, ids), clamped_experts(view, x, weights, ids)):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
