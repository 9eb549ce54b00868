"""What the ops' samples do not draw, beside plain formulas: zero points, biases, tokens of zeros; experts; scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from inferplane.conformance.subject import Subject
from inferplane.ops import OPS
from inferplane.ops.draw import Draw
from inferplane.ops.formats import FORMATS, encode
from inferplane.plugins import host

FP8_ROUNDING = 5e-2
"""Activations in FP8 round to 2^-4 of themselves."""


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error."""
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def check_product(device: str, dtype: torch.dtype, kernel_name: str, format: str, bias: bool) -> None:
    """A kernel of `linear` beside the product with the weight in float32; one token of zeros among others."""
    draw = Draw(7, dtype)
    x = draw.normal(6, 256)
    x[2] = 0
    weight = encode(draw.normal(96, 256) / 16, format)
    if FORMATS[format][0] is torch.int8:
        weight = replace(weight, zero=draw.ints(*weight.scale.shape, below=5).float() - 2)
    b = draw.normal(96) if bias else None
    subject = Subject.of(host(), device, str(dtype).removeprefix("torch."))
    (kernel,) = [k for k in subject.kernels if k.name == kernel_name]
    assert format in kernel.when.formats
    packed = SimpleNamespace(weight=kernel.packs["weight"].fn(weight), bias=b)
    got = kernel.function()(packed, x)
    want = x.float() @ weight.dequantize().float().t() + (0 if b is None else b.float())
    tolerance = FP8_ROUNDING if format == "fp8_row" else OPS["linear"].tolerance[dtype]
    assert got.isfinite().all()
    assert error(got, want) <= tolerance
    assert torch.allclose(got[2].float(), torch.zeros(96) if b is None else b.float(), atol=1e-6)


def check_experts(got, x, gate_up, down, weights, ids) -> None:
    """The output of experts with swiglu, beside the same sum in float32, expert by expert."""
    gate, up = torch.einsum("tkjd,td->tkj", gate_up[ids].float(), x.float()).chunk(2, -1)
    y = torch.einsum("tkdj,tkj->tkd", down[ids].float(), torch.nn.functional.silu(gate) * up)
    assert error(got, (y * weights[..., None]).sum(1)) <= OPS["moe_experts"].tolerance[x.dtype]


def check_scores_as_they_are(route: Callable[..., Any]) -> None:
    """A kernel of `moe_route` with softmax scores that are not made to sum to 1, and a factor."""
    logits = Draw(4, torch.float32).normal(6, 16)
    weights, ids = route(SimpleNamespace(top_k=3, renormalize=False, factor=2.0), logits)
    want = logits.softmax(-1).gather(1, ids.long()) * 2.0
    assert torch.allclose(weights, want) and (weights.sum(-1) < 2.0).all()
    assert torch.equal(ids.long().sort()[0], logits.topk(3, -1)[1].sort()[0])
