"""What the ops' samples do not reach: zero points, biases, rows in FP8, scores by sigmoid, odd numbers of experts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inferplane.ops import OPS, Linear, MoERoute, RMSNorm
from inferplane.ops.draw import Draw
from inferplane.ops.formats import encode
from inferplane.ops.op import placeholder
from inferplane.ops.quantize import Quantize
from inferplane.plugin import Context, KVRequest
from inferplane.types import Weight
from inferplane.types.batch import Query, make_batch
from inferplane_xpu.intel import chips
from inferplane_xpu.intel.kernels import attention, kernels, moe, products
from inferplane_xpu.intel.kernels.when import is_decode_compiled
from tests.vendors.emulator import Violation
from tests.vendors.mistakes import find_fault
from tests.vendors.products import check_experts, check_product, error
from tests.vendors.profile import in_vendor_dtypes

pytestmark = in_vendor_dtypes
INT4 = ("int4_group", "int4_group64", "int4_group32", "int4_row")


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("kernel", ["vllm_xpu:linear_int4", "torch_xpu:linear_int4pack"])
@pytest.mark.parametrize("format", INT4)
def test_int4(kernel, format, bias):
    check_product("xpu:intel", torch.bfloat16, kernel, format, bias)


@pytest.mark.parametrize("pack", [products.ONEDNN, products.TORCH_XPU], ids=["onednn", "torch"])
@pytest.mark.parametrize("zero", ["whole", "broken", "far"])
def test_zero_points_of_int4(pack, zero):
    """Whole ones from -8 to 7 go into the operator; others are taken off behind it."""
    draw = Draw(8, torch.bfloat16)
    weight = encode(draw.normal(48, 256) / 16, "int4_group64")
    points = draw.ints(*weight.scale.shape, below=15).float() - 7
    points = {"whole": points, "broken": points + 0.5, "far": points * 3}[zero]
    weight = replace(weight, zero=points)
    packed, x = pack.fn(weight), draw.normal(5, 256)
    assert (packed.shift is None) == (zero == "whole")
    kernel = products.linear_int4 if pack is products.ONEDNN else products.linear_int4pack
    got = kernel(SimpleNamespace(weight=packed, bias=None), x).float()
    want = x.float() @ weight.dequantize().t()
    assert error(got, want) <= OPS["linear"].tolerance[torch.bfloat16]


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_int8_and_fp8_rows(bias):
    check_product("xpu:intel", torch.bfloat16, "torch_xpu:linear_int8pack", "int8_row", bias)
    check_product("xpu:intel", torch.bfloat16, "vllm_xpu:linear_fp8", "fp8_row", bias)


@pytest.mark.parametrize("k", [3, 9])
def test_numbers_of_experts_that_were_not_compiled(k):
    """A token's first expert fills up, with weight 0."""
    draw = Draw(3, torch.bfloat16)
    x, gate_up, down = draw.normal(5, 32), draw.normal(12, 48, 32) / 6, draw.normal(12, 32, 24) / 5
    weights = draw.uniform(5, k, low=0.1)
    ids = torch.stack([torch.tensor(draw.permutation(12)[:k]) for _ in range(5)])
    stacks = SimpleNamespace(gate_up=moe.EXPERTS.fn(gate_up), down=moe.EXPERTS.fn(down))
    got = moe.moe_experts(stacks, x, weights, ids).float()
    check_experts(got, x, gate_up, down, weights, ids)


@pytest.mark.parametrize("zero", [False, True], ids=["symmetric", "zero_points"])
def test_experts_in_int4(zero):
    """Zero points, which the product does not know, are dealt with by expanding the stack."""
    draw = Draw(5, torch.bfloat16)
    stacks = {"gate_up": draw.normal(4, 256, 128) / 8, "down": draw.normal(4, 128, 128) / 8}
    quantized = {name: encode(w, "int4_group64") for name, w in stacks.items()}
    if zero:
        quantized = {n: replace(q, zero=draw.ints(*q.scale.shape, below=5).float() - 2) for n, q in quantized.items()}
    packed = {name: moe.INT4_EXPERTS.fn(q) for name, q in quantized.items()}
    x, weights, ids = draw.normal(3, 128), draw.uniform(3, 2, low=0.1), torch.tensor([[0, 3], [1, 2], [3, 1]])
    got = moe.moe_experts_int4(SimpleNamespace(**packed), x, weights, ids).float()
    want = OPS["moe_experts"](**quantized)(x, weights, ids).float()
    assert error(got, want) <= OPS["moe_experts"].tolerance[torch.bfloat16]


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(("score", "groups"), [("sigmoid", 1), ("softmax", 1), ("sigmoid", 4), ("softmax", 4)])
def test_scores(score, groups, bias):
    """A bias to softmax scores without groups is not taken."""
    bias = bias and (score, groups) != ("softmax", 1)
    draw = Draw(4, torch.float32)
    values = draw.normal(16) / 10 if bias else None
    op = MoERoute(values, 3, score, groups, 2, "top2", renormalize=not bias, factor=2.5)
    logits = draw.normal(6, 16)
    want, ids = op(logits)
    route = moe.moe_route if groups == 1 else moe.moe_route_grouped
    weights, found = route(op, logits)
    order, order0 = found.long().argsort(-1), ids.argsort(-1)
    assert torch.equal(found.long().gather(1, order), ids.gather(1, order0))
    assert torch.allclose(weights.gather(1, order), want.gather(1, order0), atol=1e-6)


@pytest.mark.parametrize("sample", ["fp8_act", "fp8_row_act"])
def test_activations_in_fp8(sample):
    """By groups and by rows, each as the weight is."""
    assert not find_fault("xpu:intel", torch.bfloat16, "vllm_xpu:linear_fp8_act", sample)


REFUSED = [
    ("linear_fp8", Linear(placeholder(256, 128, format="fp8_block")), "more than one of them along a row"),
    ("linear_fp8", Linear(placeholder(200, 256, format="fp8_block")), "whole blocks of 128"),
    (
        "linear_fp8_act",
        Linear(placeholder(256, 256, format="fp8_row"), activation_quant=Quantize("fp8", 128)),
        "as the weight is",
    ),
    ("linear_int4", Linear(placeholder(256, 192, format="int4_group64")), "columns in groups of 128"),
    ("moe_route_grouped", MoERoute(None, 33, "sigmoid", 4, 4, "top2"), "at most 32 groups"),
    ("moe_route_grouped", MoERoute(None, 2, "softmax", 4, 2, "max"), "judged by its best two"),
    ("moe_route", MoERoute(placeholder(16), 2, "softmax"), "a bias to sigmoid scores only"),
    ("rms_norm", RMSNorm(placeholder(64, dtype=torch.float32), 1e-6), "a weight in the plan's dtype"),
]


@pytest.mark.parametrize(("name", "op", "words"), REFUSED, ids=[f"{name}_{i}" for i, (name, *_) in enumerate(REFUSED)])
def test_what_the_operators_cannot_do_is_refused(name, op, words):
    (kernel,) = [k for k in kernels() if k.name == f"vllm_xpu:{name}"]
    context = Context(torch.bfloat16, "decode", features=chips.assume_features("bmg"))
    formats = {w.format for w in vars(op).values() if isinstance(w, Weight)}
    assert words in " ".join(kernel.refusals(op, context, formats))


def test_one_block_along_a_row_would_be_read_as_rows():
    """Why it is refused: the operator tells blocks from rows by the number of scales."""
    draw = Draw(6, torch.bfloat16)
    weight = products.FP8_WEIGHT.fn(encode(draw.normal(256, 128), "fp8_block"))
    with pytest.raises(Violation, match="one scale or 256 of the weight"):
        products.linear_fp8(SimpleNamespace(weight=weight, bias=None), draw.normal(3, 128))


def test_single_tokens_among_many_stay_with_the_kernels_for_many():
    """A head size and a group for which the kernels for single tokens were not compiled."""
    request = KVRequest("gqa", 1, 96, 96)
    op = SimpleNamespace(heads=9, kv=request, queries="many", scale=96**-0.5, sinks=None)
    assert attention._has_many_queries(op) and not is_decode_compiled(96, 9, None)
    draw = Draw(9, torch.bfloat16)
    cache = draw.normal(2, 64, 1, 96), draw.normal(2, 64, 1, 96)
    batch = make_batch([Query([1], 70, [0, 1], 1)], block_tokens=64, device="cpu", few_tokens=0)
    q = draw.normal(1, 9, 96)
    got = attention.attention_many(op, q, batch, SimpleNamespace(view_blocks=lambda: cache))
    k, v = (t.flatten(0, 1)[:71, 0].float() for t in cache)
    want = (q[0].float() @ k.t() * op.scale).softmax(-1) @ v
    assert torch.allclose(got[0].float(), want, atol=2e-2)
