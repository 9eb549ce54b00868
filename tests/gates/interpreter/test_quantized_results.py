"""Codes that a norm hands on: bit for bit those that quantizing its result would give, and taken by who reads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inferplane.kernels.triton import Products
from inferplane.kernels.triton import rowwise as rows
from inferplane.kernels.triton.linear import linear_fp8, linear_int8
from inferplane.kernels.triton.matmul_kernels import FP8_ERROR
from inferplane.kernels.triton.moe import moe_experts_fp8
from inferplane.kernels.triton.norm_rope_write import mla_norm_rope_write
from inferplane.kernels.triton.quantized_results import handed
from inferplane.kernels.triton.weight_packing import pack
from inferplane.ops import MLADims, Quantize, encode
from inferplane.ops.op import relative_error
from inferplane.plugin import paged_layout
from inferplane.types.batch import Query, make_batch

FORMS = [("fp8", 128), ("fp8", 0), ("int8", 0), ("int8", 64)]


def same_codes(x, format, group):
    data, scale = handed(x, format, group)
    bare = x.clone()
    assert handed(bare, format, group) is None and handed(x, format, 32) is None
    for made in (rows.quantize(SimpleNamespace(format=format, group=group), bare), Quantize(format, group)(bare)):
        assert torch.equal(data.view(torch.uint8), made[0].view(torch.uint8))
        torch.testing.assert_close(scale, made[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("format", "group"), FORMS)
def test_a_norm_s_codes(format, group, first):
    x, residual = (torch.randn(3, 320).bfloat16() * 3 for _ in range(2))
    norm = SimpleNamespace(weight=torch.randn(320).bfloat16(), eps=1e-6)
    plain = SimpleNamespace(norm=norm, codes="", codes_group=0)
    op = SimpleNamespace(norm=norm, codes=format, codes_group=group)
    y, total = rows.add_rms_norm(op, x, None if first else residual)
    want, sum_ = rows.add_rms_norm(plain, x, None if first else residual)
    assert torch.equal(y, want) and torch.equal(total, sum_) and handed(want, format, group) is None
    same_codes(y, format, group)


@pytest.mark.parametrize(("format", "group"), FORMS[:2])
def test_codes_of_a_low_rank_query(format, group):
    d = MLADims(2, 32, 16, 24, 48)
    rope = SimpleNamespace(table=torch.randn(64, 2, 8), interleaved=True)
    norms = {
        name: SimpleNamespace(weight=torch.randn(n), eps=1e-6) for name, n in (("q_a_norm", 160), ("kv_a_norm", 48))
    }
    op = SimpleNamespace(rope=rope, dims=d, codes=format, codes_group=group, **norms)
    kv = paged_layout(16).build(d.request, 4, torch.float32, torch.device("cpu"))
    batch = make_batch([Query([1, 2], 3, [0]), Query([5], 0, [2])], block_tokens=16, device="cpu")
    same_codes(mla_norm_rope_write(op, torch.randn(3, 160), torch.randn(3, 64), batch, kv), format, group)


READERS = [
    ("fp8_block", "fp8", 128, linear_fp8),
    ("int4_group64", "fp8", 128, linear_fp8),
    ("int4_group32", "fp8", 128, linear_fp8),
    ("int8_row", "int8", 0, linear_int8),
]


@pytest.mark.parametrize(("weights", "format", "group", "linear"), READERS)
def test_who_reads_takes_them(weights, format, group, linear):
    """A product with other codes than its own would make is another product: so it is seen that they are taken."""
    weight = pack(encode(torch.randn(16, 128), weights))
    op = SimpleNamespace(weight=weight, prepared=Products(fp8=True), bias=None, out_dtype=None)
    x = torch.randn(2, 128).bfloat16()
    data, scale = rows.quantize(SimpleNamespace(format=format, group=group), x)
    given, twice = (rows.hand(x.clone(), format, group, data, scale * n) for n in (1, 2))
    torch.testing.assert_close(linear(op, twice), linear(op, given) * 2)
    if weights in ("fp8_block", "int8_row"):
        torch.testing.assert_close(linear(op, given), linear(op, x))


def test_experts_take_them_too():
    torch.manual_seed(3)
    expert = lambda n, k: pack(encode(torch.randn(3, n, k), "int4_group64"))  # noqa: E731
    op = SimpleNamespace(gate_up=expert(64, 128), down=expert(128, 32), prepared=Products(fp8=True), partial=False)
    x, weights, ids = torch.randn(2, 128).bfloat16(), torch.rand(2, 2), torch.tensor([[0, 2], [2, 1]])
    data, scale = rows.quantize(SimpleNamespace(format="fp8", group=128), x)
    same, none = (rows.hand(x.clone(), "fp8", 128, data, scale * n) for n in (1, 0))
    assert not moe_experts_fp8(op, none, weights, ids).any()
    given, coded_here = moe_experts_fp8(op, same, weights, ids), moe_experts_fp8(op, x, weights, ids)
    assert 0 < relative_error(given, coded_here) < 2 * FP8_ERROR, "by 128 columns, and by 64"
