"""Quantized products with zero points and biases, by the kernels of each series."""

from __future__ import annotations

import pytest

from tests.vendors.npu import chip
from tests.vendors.products import check_product
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
