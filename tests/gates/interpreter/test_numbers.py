"""Numbers that a scale or a format cannot carry, through the portable kernels that quantize: as core's own code."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inferplane.kernels.triton import activations, kv_write, rowwise
from inferplane.kernels.triton.linear import MAX_ROWS_QUANTIZED_IN_KERNEL, linear_fp8, linear_int8
from inferplane.kernels.triton.weight_packing import pack
from inferplane.ops import encode
from inferplane.ops.formats import dequantize_rows
from inferplane.plugin import KVRequest, paged_layout
from inferplane.types.batch import Query, make_batch
from tests.gates.interpreter.test_matrices import PRODUCTS

WIDTH, GROUP = 256, 128
FORMATS = ("fp8", "int8")
ALL_BITS = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()
"""NaN as GPUs make it."""
NOT_FINITE = [float("nan"), -float("nan"), ALL_BITS, -ALL_BITS, float("inf"), -float("inf")]


def make_rows():
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5))


def quantize(x, format):
    return dequantize_rows(*rowwise.quantize_rows(x, format, GROUP), GROUP)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_what_is_no_number_stays_none(format, bad):
    x = make_rows()
    x[1, 5] = bad
    found = quantize(x, format)
    assert not found[1, 5].isfinite()
    assert found[0].isfinite().all() and found[1, GROUP:].isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_stay_zeros(format, zero):
    assert (quantize(torch.full((3, WIDTH), zero), format) == 0).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [1e-38, 1e-40, 1e-41, 3e-43, 190 * 2.0**-149, 2.0**-149])
def test_tiny_numbers_neither_wrap_nor_grow(format, size):
    x = make_rows() * 0 + size * torch.linspace(-1, 1, WIDTH)
    found = quantize(x, format)
    assert found.isfinite().all() and (found.abs() <= 2 * x.abs().max()).all()
    assert (found * x.sign() >= 0).all()


def test_nan_beside_a_static_scale_stays_nan():
    """There is no scale of its own to carry it."""
    x = make_rows()
    x[1, 5] = torch.nan
    found = rowwise.quantize_by_scale(x, torch.tensor([0.01])).view(torch.float8_e4m3fn).float()
    assert found[1, 5].isnan() and found.isnan().sum() == 1


def norm(x, format):
    return rowwise.rms_norm_quantize(x, torch.ones(WIDTH), 1e-6, quantize=format, group=GROUP)


def silu_mul(x, format):
    return activations.activation_mul_quantize(torch.cat((x.abs() + 1, x), -1), format, GROUP)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kernel", [norm, silu_mul])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_quantized_behind_another_op(kernel, format, bad):
    x = make_rows()
    x[1, 5] = bad
    found = dequantize_rows(*kernel(x, format), GROUP)
    assert not found[1, 5].isfinite() and found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_the_cache_keeps_it(kind, bad, format):
    """In the token and head that have it, and in no other."""
    request = KVRequest("gqa", 2, 64, 64) if kind == "gqa" else KVRequest("mla", 1, 192)
    kv = paged_layout(16, format).build(request, 2, torch.float32, torch.device("cpu"))
    batch = make_batch([Query([0] * 3, 0, [1])], block_tokens=16, device="cpu")
    g = torch.Generator().manual_seed(5)
    if kind == "gqa":
        k, v = torch.randn(2, 3, 2, 64, generator=g)
        k[1, 0, 5] = v[2, 1, 7] = bad
        kv_write.kv_write(None, k, v, batch, kv)
        k, v = kv.read(torch.tensor([1]), 3)
        assert not k[1, 0, 5].isfinite() and not v[2, 1, 7].isfinite()
        assert k[[0, 2]].isfinite().all() and k[1, 1].isfinite().all() and v[:2].isfinite().all()
    else:
        latent, key = torch.randn(3, 128, generator=g), torch.randn(3, 64, generator=g)
        latent[1, 5] = bad
        kv_write.mla_kv_write(None, latent, key, batch, kv)
        (found,) = kv.read(torch.tensor([1]), 3)
        assert not found[1, 5].isfinite() and found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("fp8", [True, False], ids=["multiplies in FP8", "widens"])
@pytest.mark.parametrize("count", [1, MAX_ROWS_QUANTIZED_IN_KERNEL + 1])
@pytest.mark.parametrize("format", ["fp8_row", "fp8_block", "int8_row"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_products_pass_it_on(bad, format, count, fp8):
    """Few rows are quantized inside the product, many before it. The row that has it is lost, and no other."""
    weight = pack(encode(make_rows().repeat(24, 1), format))
    x = torch.randn(count + 1, WIDTH, generator=torch.Generator().manual_seed(6))
    x[count, 5] = bad
    op = SimpleNamespace(weight=weight, prepared=replace(PRODUCTS, fp8=fp8), bias=None, out_dtype=torch.float32)
    found = (linear_int8 if format == "int8_row" else linear_fp8)(op, x.bfloat16())
    assert not found[count].isfinite().any() and found[:count].isfinite().all()


@pytest.mark.parametrize("fp8", [True, False], ids=["multiplies in FP8", "widens"])
@pytest.mark.parametrize("count", [1, MAX_ROWS_QUANTIZED_IN_KERNEL + 1])
def test_products_pass_nan_on_beside_a_static_scale(count, fp8):
    weight = pack(replace(encode(make_rows().repeat(24, 1), "fp8_row"), act_scale=torch.tensor([0.01])))
    x = torch.randn(count + 1, WIDTH, generator=torch.Generator().manual_seed(6))
    x[count, 5] = torch.nan
    op = SimpleNamespace(weight=weight, prepared=replace(PRODUCTS, fp8=fp8), bias=None, out_dtype=torch.float32)
    found = linear_fp8(op, x.bfloat16())
    assert found[count].isnan().all() and found[:count].isfinite().all()
