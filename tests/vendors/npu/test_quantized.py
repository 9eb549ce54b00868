"""Quantized products with zero points and biases, by the kernels of each series, and the cache in int8."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from inferplane.engine import InferplaneWarning
from inferplane.ops import OPS
from inferplane.ops.draw import Draw
from inferplane.ops.formats import encode
from inferplane_npu.kernels import quant
from tests.vendors.engine import serve
from tests.vendors.npu import chip
from tests.vendors.products import check_product, error
from tests.vendors.profile import DRAFTS, in_vendor_dtypes

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


@in_vendor_dtypes
@pytest.mark.skipif(chip.ARCH == "310p", reason="its attention reads no int8")
@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        ("llama", "torch_npu:attention_int8"),
        ("llama_head_64", "torch_npu:attention_int8"),
        ("mistral_window", "torch_npu:attention_int8_window"),
    ],
)
def test_serves_a_cache_in_int8(family, kernel, speculative):
    """Chunks of a long prompt, single tokens and drafts share steps, without a hot op on torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        plan = serve("npu", chip.DTYPE, family, strict=True, kv_cache_dtype="int8", speculative_config=speculative)
    assert {layout["layout"] for layout in plan["kv_layouts"]} == {"npu_nd_128_int8"}
    assert {s["chosen"]["kernel"] for s in plan["sites"] if s["op"] == "attention"} == {kernel}
