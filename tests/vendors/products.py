"""Quantized products on weights that the ops' samples do not draw: zero points, biases, tokens of zeros."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from inferplane.conformance.subject import Subject
from inferplane.ops import OPS
from inferplane.ops.draw import Draw
from inferplane.ops.quantize import FORMATS, encode
from inferplane.plugins import host

FP8_ROUNDING = 5e-2
"""Activations in FP8 round to 2^-4 of themselves."""


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
    got = kernel.function()(packed, x).float()
    want = x.float() @ weight.dequantize().float().t() + (0 if b is None else b.float())
    tolerance = FP8_ROUNDING if format == "fp8_row" else OPS["linear"].tolerance[dtype]
    assert got.isfinite().all()
    assert ((got - want).norm() / want.norm()).item() <= tolerance
    assert torch.allclose(got[2], torch.zeros(96) if b is None else b.float(), atol=1e-6)
