"""What the kernels refuse, and what they take from the vendor's functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.ops import MLAAbsorbed, MLADims, MoEExperts, MoERoute, NormRopeWrite, RMSNorm
from inferplane.plugin import Context, Weight
from inferplane_dcu.backend import DcuBackend
from inferplane_dcu.kernels.when import only
from inferplane_dcu.kvcache import layouts

V3 = MLADims(2, 128, 64, 128, 512)


def weight(*shape, dtype=None):
    return Weight(("w",), shape, dtype)


def refusals(provider, op):
    """Why the provider's kernels of an op in 16 bits do not take it, in bfloat16 on gfx936, in the first
    layout on offer.
    """
    backend = DcuBackend()
    chosen = {r: layouts(r)[0] for r in op.kv_requests()}
    ctx = Context(torch.bfloat16, "decode", chosen, backend.features("gfx936"))
    own = [
        k
        for k in backend.kernels()
        if (k.op, k.provider) == (op.name, provider) and not k.name.endswith(("_fp8", "_w8a8"))
    ]
    assert own
    return [reason for k in own for reason in k.refusals(op, ctx, op.formats())]


def entering(eps_q=1e-6, dtype=None):
    (sample,) = [s for s in NormRopeWrite.samples() if s.label == "d128"]
    norms = {"q_norm": RMSNorm(weight(128, dtype=dtype), eps_q), "k_norm": RMSNorm(weight(128), 1e-6)}
    return replace(sample.op, **norms)


@pytest.mark.parametrize(
    ("provider", "op", "words"),
    [
        ("lightop", RMSNorm(weight(64, dtype=torch.float32), 1e-6), "a weight in the plan's dtype"),
        ("lightop", entering(eps_q=1e-5), "with one epsilon"),
        ("lightop", entering(dtype=torch.float32), "weights in the plan's dtype"),
        ("flash_mla", MLAAbsorbed(weight(64, 48), MLADims(1, 32, 16, 32, 48), 1.0, V3.request), "latents of 512 + 64"),
        ("lightop", MoERoute(weight(48), 4, "sigmoid", 4, 2, "top2"), "a power of two of experts"),
        ("lightop", MoERoute(weight(256), 4, "sigmoid", 4, 2, "top2"), "at most 32 a group"),
        ("lightop", MoERoute(None, 2, "softmax"), "sigmoid scores"),
        ("lightop", MoEExperts(weight(4, 96, 64), weight(4, 64, 48), partial=True), "every expert on this rank"),
        ("lightop", MoEExperts(weight(4, 80, 64), weight(4, 64, 40)), "widths in 32s"),
        ("lightop", MoEExperts(weight(4, 96, 48), weight(4, 48, 48)), "widths in 32s"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_is_refused_with_its_reason(provider, op, words):
    assert any(words in reason for reason in refusals(provider, op)), refusals(provider, op)


@pytest.mark.parametrize(
    ("provider", "op"),
    [
        ("lightop", RMSNorm(weight(64), 1e-6)),
        ("lightop", entering()),
        ("flash_mla", MLAAbsorbed(weight(512, 512), V3, 1.0, V3.request)),
        ("lightop", MoERoute(weight(256), 8, "sigmoid", 8, 4, "top2", factor=2.5)),
        ("lightop", MoEExperts(weight(4, 96, 64), weight(4, 64, 48))),
    ],
)
def test_is_taken(provider, op):
    assert refusals(provider, op) == []


def test_the_output_is_taken_from_what_comes():
    out, mass = torch.ones(2, 3), torch.zeros(2)
    assert only(out) is out and only((out, mass)) is out and only([out, mass, None]) is out
