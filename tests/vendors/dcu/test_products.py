"""What the ops' samples do not reach: zero points and biases, a status, results with an LSE beside them."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inferplane.ops import OPS, Attention, MoEExperts
from inferplane.ops.draw import Draw
from inferplane.ops.formats import dequantize_rows, encode
from inferplane.ops.quantize import Quantize
from inferplane.plugin import KVRequest
from inferplane_dcu import vendor
from inferplane_dcu.kernels import attention, basic, moe
from inferplane_dcu.kvcache import HeadsKV
from tests.vendors.dcu import chip, emulate_moe, emulated
from tests.vendors.emulator import Violation
from tests.vendors.products import error

pytestmark = chip.whole
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def unheard(monkeypatch):
    """What is called here is not what the backend calls."""
    monkeypatch.setattr(emulated.EMULATOR, "listeners", [])


def product(weight, bias, x):
    found = vendor.find_once(vendor.QUANTIZE, vendor.W8A8)(None, None)
    return basic.linear_w8a8(SimpleNamespace(weight=basic.Int8Rows(weight), bias=bias, prepared=found), x)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_w8a8_with_zero_points(bias):
    draw = Draw(7, BF16)
    x = draw.normal(6, 256)
    x[2] = 0
    weight = encode(draw.normal(96, 256) / 16, "int8_row")
    weight = replace(weight, zero=draw.ints(*weight.scale.shape, below=5).float() - 2)
    b = draw.normal(96) if bias else None
    got = product(weight, b, x).float()
    rounded = dequantize_rows(*Quantize("int8", 0)(x), 0)
    want = rounded @ weight.dequantize().t() + (0 if b is None else b.float())
    assert error(got, want) <= OPS["linear"].tolerance[BF16]
    assert torch.allclose(got[2], torch.zeros(96) if b is None else b.float(), atol=1e-6)


@pytest.mark.parametrize("status", [False, None], ids=str)
def test_a_product_that_says_no_is_an_error(status, monkeypatch):
    """What stands in the result is then nothing that anybody computed."""
    monkeypatch.setattr(sys.modules["lightop.gemm_ops"], "hipblaslt_w8a8_gemm", lambda *a: (status, torch.ones(6, 96)))
    draw = Draw(7, BF16)
    with pytest.raises(RuntimeError, match="did not multiply 6 x 256 by 256 x 96"):
        product(encode(draw.normal(96, 256), "int8_row"), None, draw.normal(6, 256))


@pytest.mark.parametrize("shape", [(2, 32, 16), (1, 96, 64), (3, 64, 48)], ids=str)
def test_marlins_order_and_back(shape):
    weight = torch.arange(float(torch.Size(shape).numel())).view(shape)
    packed = moe.Marlin(weight)
    for e in range(shape[0]):
        assert torch.equal(emulate_moe.plain(packed.data[e], shape[2]), weight[e].t()), "as the vendor reads it"
        assert torch.equal(packed[e], weight[e])


@pytest.mark.parametrize("tokens", [1, emulate_moe.MOST_TOKENS, emulate_moe.MOST_TOKENS + 1])
def test_experts_with_a_configuration_and_without(tokens, monkeypatch):
    """Where lightop has none, torch multiplies by the same packed weights; each size is looked up once."""
    draw = Draw(5, BF16)
    x, gate_up, down = draw.normal(tokens, 64), draw.normal(5, 96, 64) / 8, draw.normal(5, 64, 48) / 7
    weights = draw.uniform(tokens, 2, low=0.1)
    ids = torch.stack([torch.tensor(draw.permutation(5)[:2]) for _ in range(tokens)])
    packed = {"gate_up": moe.Marlin(gate_up), "down": moe.Marlin(down)}
    view = SimpleNamespace(**packed, prepared=moe.LightopExperts())
    products, looked_up = [], []
    product, config = view.prepared.product, view.prepared.config
    monkeypatch.setattr(view.prepared, "product", lambda *args: (products.append(args), product(*args)))
    monkeypatch.setattr(view.prepared, "config", lambda *args: (looked_up.append(args), config(*args))[1])
    want = MoEExperts(gate_up, down)(x, weights, ids).float()
    for _ in range(2):
        got = moe.moe_experts(view, x, weights, ids.int()).float()
        assert error(got, want) <= OPS["moe_experts"].tolerance[BF16]
    assert len(products) == (4 if tokens <= emulate_moe.MOST_TOKENS else 0)
    assert len(looked_up) == 1


def test_a_configuration_is_of_a_number_of_tokens_and_experts():
    view = SimpleNamespace(gate_up=moe.Marlin(torch.ones(5, 96, 64)))
    known, x = moe.LightopExperts(), torch.ones(emulate_moe.MOST_TOKENS + 1, 64, dtype=BF16)
    assert known.configurations(view, x[:1], 2) and known.configurations(view, x[:1], 3)
    assert known.configurations(view, x, 2) is None
    assert len(known._known) == 3


def step(sequences, queries="few"):
    """An attention op over blocks of heads, its inputs, and what its body gives."""
    request = KVRequest("gqa", 2, 64, 64)
    draw = Draw(3, BF16, build_kv=lambda r, blocks: HeadsKV(r, blocks, BF16, torch.device("cpu")))
    batch, kv = draw.step(request, sequences, written=True)
    op = Attention(4, 0.125, request, queries)
    q = draw.normal(batch.tokens, 4, 64)
    return op, q, batch, kv, op(q, batch, kv)


@pytest.mark.parametrize("several", [1, 2, 4], ids="{}_tokens".format)
def test_sequences_of_the_same_few_tokens(several):
    """Asked as one batch the fork would answer for one KV head only; each token alone it answers for all."""
    op, q, batch, kv, want = step([(several, 70), (several, 9)])
    view = SimpleNamespace(scale=op.scale, kv=op.kv, prepared=vendor.FLASH_TOKENS.find())
    got = attention.attention_tokens(view, q, batch, kv)
    assert error(got, want) <= OPS["attention"].tolerance[BF16]
    prompts = vendor.FLASH_PROMPTS.find()
    if several > 1:
        view = SimpleNamespace(scale=op.scale, kv=op.kv, prepared=prompts)
        with pytest.raises(Violation, match="one KV head"):
            attention.attention_prompts(view, q, batch, kv)


@pytest.mark.parametrize("form", [lambda out: out, lambda out: (out, out.new_zeros(4)), lambda out: [out, None, None]])
def test_an_lse_beside_the_output_or_none(form):
    """Releases and paths of the fork give the output alone, or with the LSE and more behind it."""
    op, q, batch, kv, want = step([(1, 5), (1, 90)])
    real = vendor.FLASH_TOKENS.find()
    view = SimpleNamespace(scale=op.scale, kv=op.kv, prepared=lambda *args, **kwargs: form(real(*args, **kwargs)))
    got = attention.attention_tokens(view, q, batch, kv)
    assert error(got, want) <= OPS["attention"].tolerance[BF16]


def test_paged_attention_gives_no_lse():
    """As in the fork: with an LSE requested it gives the output alone, which unpacks silently for a batch of two."""
    _, q, batch, kv, _ = step([(1, 5), (1, 90)])
    call = {"cache_seqlens": batch.seq_lens, "block_table": batch.block_tables, "softmax_scale": 0.125}
    result = vendor.FLASH_TOKENS.find()(q[:, None], kv.keys, kv.values, causal=True, return_softmax_lse=True, **call)
    assert isinstance(result, torch.Tensor)
    out, _mass = result
    assert out.shape == (1, 4, 64), "a sequence's output, taken for the batch's"
