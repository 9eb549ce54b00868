"""Quantized products on weights that the ops' samples do not draw: zero points, biases, tokens of zeros."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inferplane.conformance.subject import Subject
from inferplane.ops import OPS
from inferplane.ops.draw import Draw
from inferplane.ops.quantize import FORMATS, encode
from inferplane.plugins import host
from tests.vendors.npu import chip

SERVED = {"910b": ("int8_row", "int4_group", "int4_row"), "310p": ("int8_row",), "950": ("int8_row", "fp8_row")}
pytestmark = pytest.mark.skipif(chip.LIFTED, reason="in the vendor's dtypes: without INFERPLANE_EMULATED_FLOAT32")


def kernel_for(format: str):
    """The vendor's product for a weight format."""
    subject = Subject.of(host(), "npu", str(chip.DTYPE).removeprefix("torch."))
    fits = [k for k in subject.kernels if k.op == "linear" and format in k.when.formats and k.provider == "torch_npu"]
    return next(k for k in fits if k.name != "torch_npu:linear_w8a8")


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("format", SERVED[chip.ARCH])
def test_products(format, bias):
    """One token of zeros among others."""
    draw = Draw(7, chip.DTYPE)
    x = draw.normal(6, 256)
    x[2] = 0
    weight = encode(draw.normal(96, 256) / 16, format)
    if FORMATS[format][0] is torch.int8:
        weight = replace(weight, zero=draw.ints(*weight.scale.shape, below=5).float() - 2)
    b = draw.normal(96) if bias else None
    kernel = kernel_for(format)
    packed = SimpleNamespace(weight=kernel.packs["weight"].fn(weight), bias=b)
    got = kernel.target(packed, x).float()
    want = x.float() @ weight.dequantize().float().t() + (0 if b is None else b.float())
    tolerance = 5e-2 if format == "fp8_row" else OPS["linear"].tolerance[chip.DTYPE]  # activations in FP8 round to 2^-4
    assert got.isfinite().all()
    assert ((got - want).norm() / want.norm()).item() <= tolerance
    assert torch.allclose(got[2], torch.zeros(96) if b is None else b.float(), atol=1e-6)
