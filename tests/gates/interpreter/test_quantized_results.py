"""Quantized forms that a norm leaves: bit for bit what quantizing its result gives, and the next product uses them."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from inferplane.kernels.triton import Products, rowwise
from inferplane.kernels.triton.experts.moe import moe_experts_fp8
from inferplane.kernels.triton.linear import linear_fp8, linear_int8
from inferplane.kernels.triton.matmul_kernels import FP8_ERROR
from inferplane.kernels.triton.norm_rope_write import mla_norm_rope_write
from inferplane.kernels.triton.quantized_results import QuantizedActivation, find_quantized, keep_quantized
from inferplane.kernels.triton.weight_packing import pack
from inferplane.ops import MLADims, Quantize, encode
from inferplane.ops.op import relative_error
from inferplane.plugin import ActivationQuant, paged_layout
from inferplane.types.batch import Query, make_batch

FORMS = [("fp8", 128), ("fp8", 0), ("int8", 0), ("int8", 64)]


def with_quantized(x, format, group, values, scales):
    """A copy of `x` whose quantized form is kept."""
    keep_quantized(y := x.clone(), QuantizedActivation(format, group, values, scales))
    return y


def same_quantized(x, format, group):
    found = find_quantized(x, format, group)
    bare = x.clone()
    assert find_quantized(bare, format, group) is None and find_quantized(x, format, 32) is None
    for made in (rowwise.quantize_rows(bare, format, group), Quantize(format, group)(bare)):
        assert torch.equal(found.values.view(torch.uint8), made[0].view(torch.uint8))
        torch.testing.assert_close(found.scales, made[1], rtol=1e-6, atol=0)


def test_a_quantized_form_dies_with_its_tensor():
    """So none is found for another tensor that takes the same memory."""
    x = torch.randn(2, 128)
    keep_quantized(x, QuantizedActivation("fp8", 128, values := torch.zeros(2, 128), torch.ones(2, 1)))
    assert find_quantized(x, "fp8", 128).values is values and find_quantized(x[:], "fp8", 128) is None
    alive = weakref.ref(values)
    del x, values
    assert alive() is None


@pytest.mark.parametrize(("first", "offset"), [(False, 0.0), (True, 0.0), (False, 1.0)])
@pytest.mark.parametrize(("format", "group"), FORMS)
def test_the_quantized_form_of_a_norm(format, group, first, offset):
    x, residual = (torch.randn(3, 320).bfloat16() * 3 for _ in range(2))
    norm = SimpleNamespace(weight=torch.randn(320).bfloat16(), eps=1e-6, offset=offset)
    plain = SimpleNamespace(norm=norm, output_quant=None)
    op = SimpleNamespace(norm=norm, output_quant=ActivationQuant(format, group))
    y, total = rowwise.add_rms_norm(op, x, None if first else residual)
    want, sum_ = rowwise.add_rms_norm(plain, x, None if first else residual)
    assert torch.equal(y, want) and torch.equal(total, sum_) and find_quantized(want, format, group) is None
    same_quantized(y, format, group)


@pytest.mark.parametrize(("format", "group"), FORMS[:2])
def test_the_quantized_form_of_a_low_rank_query(format, group):
    d = MLADims(2, 32, 16, 24, 48)
    rope = SimpleNamespace(table=torch.randn(64, 2, 8), interleaved=True)
    norms = {
        name: SimpleNamespace(weight=torch.randn(n), eps=1e-6) for name, n in (("q_a_norm", 160), ("kv_a_norm", 48))
    }
    op = SimpleNamespace(rope=rope, dims=d, output_quant=ActivationQuant(format, group), **norms)
    kv = paged_layout(16).build(d.request, 4, torch.float32, torch.device("cpu"))
    batch = make_batch([Query([1, 2], 3, [0]), Query([5], 0, [2])], block_tokens=16, device="cpu")
    same_quantized(mla_norm_rope_write(op, torch.randn(3, 160), torch.randn(3, 64), batch, kv), format, group)


READERS = [
    ("fp8_block", "fp8", 128, linear_fp8),
    ("int4_group64", "fp8", 128, linear_fp8),
    ("int4_group32", "fp8", 128, linear_fp8),
    ("int8_row", "int8", 0, linear_int8),
]


@pytest.mark.parametrize(("weights", "format", "group", "linear"), READERS)
def test_a_product_uses_it(weights, format, group, linear):
    """Another quantized form than the product would make gives another result, which shows that it is used."""
    weight = pack(encode(torch.randn(16, 128), weights))
    op = SimpleNamespace(weight=weight, prepared=Products(fp8=True), bias=None, out_dtype=None)
    x = torch.randn(2, 128).bfloat16()
    data, scale = rowwise.quantize_rows(x, format, group)
    given, twice = (with_quantized(x, format, group, data, scale * n) for n in (1, 2))
    torch.testing.assert_close(linear(op, twice), linear(op, given) * 2)
    if weights in ("fp8_block", "int8_row"):
        torch.testing.assert_close(linear(op, given), linear(op, x))


def test_experts_use_it_too():
    torch.manual_seed(3)
    expert = lambda n, k: pack(encode(torch.randn(3, n, k), "int4_group64"))  # noqa: E731
    op = SimpleNamespace(gate_up=expert(64, 128), down=expert(128, 32), prepared=Products(fp8=True), partial=False)
    x, weights, ids = torch.randn(2, 128).bfloat16(), torch.rand(2, 2), torch.tensor([[0, 2], [2, 1]])
    data, scale = rowwise.quantize_rows(x, "fp8", 128)
    same, none = (with_quantized(x, "fp8", 128, data, scale * n) for n in (1, 0))
    assert not moe_experts_fp8(op, none, weights, ids).any()
    given, coded_here = moe_experts_fp8(op, same, weights, ids), moe_experts_fp8(op, x, weights, ids)
    assert 0 < relative_error(given, coded_here) < 2 * FP8_ERROR, "by 128 columns, and by 64"
