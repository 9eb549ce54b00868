"""Quantized products with zero points and biases, by the kernels of each series."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inferplane.ops import OPS
from inferplane.ops.draw import Draw
from inferplane.ops.formats import encode
from inferplane_npu.kernels import quant
from tests.vendors.npu import chip
from tests.vendors.products import check_product, error
from tests.vendors.profile import in_vendor_dtypes

INT4, INT8, FP8 = "torch_npu:linear_w4a16", "torch_npu:linear_w8a16", "torch_npu:linear_fp8"
SERVED = {
    "910b": [(INT8, "int8_row"), (INT4, "int4_group"), (INT4, "int4_row")],
    "310p": [(INT8, "int8_row")],
    "950": [(INT8, "int8_row"), (FP8, "fp8_row")],
}


@in_vendor_dtypes
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(("kernel", "format"), SERVED[chip.ARCH])
def test_products(kernel, format, bias):
    check_product("npu", chip.DTYPE, kernel, format, bias)


@in_vendor_dtypes
@pytest.mark.skipif(chip.ARCH == "950", reason="the 910b's kernels")
@pytest.mark.parametrize("rows", [[0, 3, 5], []], ids=["three", "none"])
def test_a_head_with_more_rows_than_a_product_takes(rows, monkeypatch):
    monkeypatch.setattr(quant, "HEAD_ROWS", 40)
    draw = Draw(7, chip.DTYPE)
    weight, x = encode(draw.normal(104, 256) / 16, "int8_row"), draw.normal(6, 256)
    packed = quant.HEAD_INT8.fn(weight)
    assert [part.data.shape[-1] for part in packed] == [40, 40, 24]
    batch = SimpleNamespace(logit_rows=torch.tensor(rows, dtype=torch.long))
    got = quant.lm_head_w8a16(SimpleNamespace(weight=packed), x, batch)
    assert got.shape == (len(rows), 104) and got.dtype is torch.float32
    if rows:
        assert error(got, x[rows].float() @ weight.dequantize().t()) <= OPS["lm_head"].tolerance[chip.DTYPE]
