"""Quantized weights in the whole engine: in int4 the vendor's product is float16's alone."""

from __future__ import annotations

import pytest
import torch

from tests.vendors.engine import serve
from tests.vendors.kunlun.profile import PROFILE
from tests.vendors.profile import in_vendor_dtypes


@in_vendor_dtypes
@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("weight_only_int8", torch.bfloat16), ("weight_only_int4", torch.float16)],
    ids=["int8", "int4"],
)
def test_serves_quantized(quantization, dtype):
    plan = serve(PROFILE.device, dtype, "llama", tokens=8, quantization=quantization)
    kernels = {site["chosen"]["kernel"] for site in plan["sites"]}
    assert ("kunlun_ops:linear_w4a16" in kernels) == (dtype is torch.float16), kernels
