"""What the ops' samples do not reach: zero points and biases, many pairs, many tokens, many sequences, wide heads."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inferplane.ops import OPS, Attention
from inferplane.ops.draw import Draw
from inferplane.ops.formats import encode
from inferplane.plugin import KVRequest, UsageError
from inferplane.types.batch import Query, make_batch
from inferplane_xpu.kunlun.kernels import attention, basic, lengths, moe, quant
from inferplane_xpu.kunlun.kvcache import layouts
from tests.vendors.kunlun.emulated import EMULATOR
from tests.vendors.products import check_experts, check_product, check_scores_as_they_are, error
from tests.vendors.profile import in_vendor_dtypes

pytestmark = in_vendor_dtypes
DEVICE = "xpu:kunlun"
both_biases = pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])


@both_biases
def test_both_sides_in_int8(bias):
    check_product(DEVICE, torch.bfloat16, "kunlun_ops:linear_w8a8", "int8_row", bias)


@both_biases
@pytest.mark.parametrize("groups", list(quant.INT4_GROUPS))
def test_int4_weights(groups, bias):
    check_product(DEVICE, torch.float16, "kunlun_ops:linear_w4a16", groups, bias)


@pytest.mark.parametrize("tokens", [255, 256])
def test_int4_weights_with_few_and_many_tokens(tokens):
    """From 256 tokens on they are expanded first; the results are the same product's."""
    draw = Draw(3, torch.float16)
    x, weight = draw.normal(tokens, 256), encode(draw.normal(96, 256) / 16, "int4_group")
    heard = []
    with EMULATOR.listen(lambda name, *call: heard.append(name)):
        got = quant.linear_w4a16(SimpleNamespace(weight=quant.INT4_WORDS.fn(weight), bias=None), x).float()
    assert heard == ["kunlun_ops::awq_dequantize" if tokens == 256 else "kunlun_ops::awq_gemm"]
    want = x.float() @ weight.dequantize().t()
    assert error(got, want) <= OPS["linear"].tolerance[torch.float16]


def test_int4_words_hold_columns_in_pairs():
    """Nibbles from the lowest: columns 1, 0, 3, 2, 5, 4, 7, 6; the highest may set the word's sign."""
    assert quant.words(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])).tolist() == [[0x78563412]]
    assert quant.words(torch.tensor([[0, 0, 0, 0, 0, 0, 15, 0]])).tolist() == [[(15 << 28) - (1 << 32)]]


@pytest.mark.parametrize("zero", [0.5, 8.0])
def test_zero_points_that_words_do_not_hold_are_refused(zero):
    weight = encode(torch.randn(8, 128), "int4_group")
    with pytest.raises(UsageError, match="no integers from -7 to 7"):
        quant.INT4_WORDS.fn(replace(weight, zero=torch.full_like(weight.scale, zero)))


@pytest.mark.parametrize("tokens", [384, 385])
def test_either_sorting(tokens):
    """768 pairs are few, 770 many; the emulator takes each operator on its side only."""
    draw = Draw(3, torch.bfloat16)
    x, gate_up, down = draw.normal(tokens, 32), draw.normal(9, 48, 32) / 6, draw.normal(9, 32, 24) / 5
    weights = draw.uniform(tokens, 2, low=0.1)
    ids = torch.stack(
        [torch.tensor(draw.permutation(8)[:2]) for _ in range(tokens)]
    )  # no token goes to the ninth expert
    heard = []
    with EMULATOR.listen(lambda name, *call: heard.append(name)):
        got = moe.moe_experts(SimpleNamespace(gate_up=gate_up, down=down), x, weights, ids)
    assert heard[0] == ("xspeedgate_ops::moe_pre_small" if tokens == 384 else "kunlun_ops::gen_block_statistic")
    check_experts(got, x, gate_up, down, weights, ids)


def test_many_pairs_are_not_sorted_as_few(monkeypatch):
    """The other library's operator, which one of the vendor's calls takes up to 768 pairs only."""
    monkeypatch.setattr(moe, "FEW_PAIRS", 10**6)
    x, ids = torch.zeros(385, 32, dtype=torch.bfloat16), torch.zeros(385, 2, dtype=torch.int32)
    with pytest.raises(AssertionError, match="at most 768 pairs, got 770"):
        moe._sort_pairs(x, ids, 4)


def test_softmax_scores_as_they_are():
    check_scores_as_they_are(moe.moe_route)


def test_a_head_in_parts(monkeypatch):
    """No product has more rows than the limit, and the logits are those of one product."""
    draw, seen = Draw(5, torch.float16), []
    x, weight = draw.normal(4, 32), draw.normal(101, 32)
    linear = torch.nn.functional.linear
    monkeypatch.setattr(basic, "WIDEST_HALF", 40)
    monkeypatch.setattr(basic.F, "linear", lambda x, w: seen.append(len(w)) or linear(x, w))
    got = basic.lm_head_in_parts(SimpleNamespace(weight=weight), x, SimpleNamespace(logit_rows=torch.tensor([3, 1])))
    assert seen == [40, 40, 21]
    assert got.dtype is torch.float32 and torch.allclose(got, linear(x, weight).float()[[3, 1]], rtol=1e-2, atol=1e-2)


def test_more_sequences_than_one_call_takes():
    """1024 fail on the card, so a step of 1030 is two calls."""
    request = KVRequest("gqa", 1, 32, 32)
    draw = Draw(6, torch.bfloat16)
    kv = layouts(request)[0].build(request, 1030, torch.bfloat16, torch.device("cpu"))
    batch = make_batch([Query([1], 2, [i]) for i in range(1030)], block_tokens=16, device="cpu")
    kv.write(torch.arange(1030 * 16), draw.normal(1030 * 16, 1, 32), draw.normal(1030 * 16, 1, 32))
    q, op, heard = draw.normal(1030, 2, 32), Attention(2, 32**-0.5, request, "few"), []
    with EMULATOR.listen(lambda name, args, call, result: heard.append(call["batch_num"])):
        got = attention.attention_few(op, q, batch, kv)
    assert heard == [1023, 7]
    want = op(q, batch, kv).float()
    assert error(got, want) <= OPS["attention"].tolerance[torch.bfloat16]


def test_each_draft_ends_a_sequence_of_its_own():
    batch = make_batch([Query([1], 4, [3]), Query([5, 6, 7], 14, [0, 2])], block_tokens=16, device="cpu")
    found = lengths.sequence_per_token(batch)
    assert found.lens_cpu.tolist() == found.lens_xpu.tolist() == [5, 15, 16, 17]
    assert found.tables.tolist() == [[3, 0], [0, 2], [0, 2], [0, 2]]
    assert lengths.sequence_per_token(batch) is found, "computed once per step"
    assert lengths.sequence_per_token(replace(batch)) is not found
