"""Embedding, norms, linear layers, activations and rotary positions against formulas in float64."""

import pytest
import torch

from inferplane.ops import (
    AddRMSNorm,
    AllReduce,
    Embedding,
    GatedMLP,
    Linear,
    LMHead,
    Quantize,
    RMSNorm,
    Rope,
    SiluMul,
    encode,
)
from inferplane.types import Weight
from inferplane.types.batch import Query, make_batch
from tests.unit.support.formulas import norm, rope_table, rotate, silu
from tests.unit.support.small import BF16, DTYPES, F32, bound, close, w


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype):
    op, weight = RMSNorm(w("n", 96), 1e-3), torch.rand(96).to(dtype) + 0.5
    x = (torch.randn(5, 3, 160) * 0.05).to(dtype)[..., 32:128]  # small: eps must matter; strided
    assert close(op, bound(op, {"n": weight}, dtype=dtype)(x), norm(x, weight, 1e-3), dtype)


def test_add_rms_norm():
    op, weight = AddRMSNorm(RMSNorm(w("n", 64), 1e-6)), torch.rand(64) + 0.5
    f, x, r = bound(op, {"n": weight}), torch.randn(4, 64), torch.randn(4, 64)
    kept = x.clone(), r.clone()
    y, s = f(x, r)
    assert torch.equal(s, x + r) and close(op, y, norm(x + r, weight, 1e-6))
    assert torch.equal(x, kept[0]) and torch.equal(r, kept[1])
    y, s = f(x, None)
    assert torch.equal(s, x) and close(op, y, norm(x, weight, 1e-6))


def test_embedding():
    table, ids = torch.randn(10, 8), torch.tensor([3, 9, 0, 3])
    assert torch.equal(bound(Embedding(w("e", 10, 8)), {"e": table})(ids), table[ids])


def test_a_divided_embedding_sums_to_the_whole():
    table, ids = torch.randn(10, 8), torch.tensor([3, 9, 0, 4, 5])
    parts = [
        bound(Embedding(w("e", 5, 8), first=5 * r, reduce=AllReduce(1)), {"e": table[5 * r : 5 * r + 5]})(ids)
        for r in range(2)
    ]
    assert torch.equal(parts[0] + parts[1], table[ids])
    assert not parts[0][[1, 4]].any() and not parts[1][[0, 2, 3]].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_with_bias(dtype):
    op = Linear(w("w", 48, 80), bias=w("b", 48))
    x, weight, bias = torch.randn(5, 80).to(dtype), torch.randn(48, 80).to(dtype), torch.randn(48).to(dtype)
    want = x.double() @ weight.double().T + bias.double()
    assert close(op, bound(op, {"w": weight, "b": bias}, dtype=dtype)(x), want, dtype)


def test_a_router_is_computed_in_float32():
    op = Linear(w("w", 16, 512), out_dtype=F32)
    x, weight = torch.randn(3, 512).bfloat16(), torch.randn(16, 512).bfloat16()
    got = bound(op, {"w": weight}, dtype=BF16)(x)
    assert got.dtype is F32 and close(op, got, x.double() @ weight.double().T)


@pytest.mark.parametrize("format", ["int8_row", "int8_group", "int4_group", "int4_row", "fp8_block", "fp8_row"])
def test_a_quantized_weight_stands_for_its_values(format):
    weight = torch.randn(72, 200)
    q = encode(weight, format)
    op = Linear(w("w", 72, 200, format=format))
    x = torch.randn(4, 200)
    got = bound(op, {"w": weight}, readers={format: lambda source, name, shard: q})(x)
    assert close(op, got, x.double() @ q.dequantize().double().T)
    assert not close(op, got, x.double() @ weight.double().T), "as if nothing had been lost"


def test_quantized_activations():
    q = encode(torch.randn(40, 256), "fp8_block")
    op = Linear(w("w", 40, 256, format="fp8_block"), activation_quant=Quantize("fp8", 128), activation_group=128)
    x = torch.randn(3, 256) * torch.logspace(-2, 2, 256)
    rounded = torch.empty_like(x)
    for row in range(3):
        for cut in (slice(0, 128), slice(128, 256)):
            scale = x[row, cut].abs().max() / 448
            rounded[row, cut] = (x[row, cut] / scale).to(torch.float8_e4m3fn).float() * scale
    got = bound(op, {"w": torch.empty(40, 256)}, readers={"fp8_block": lambda *_: q})(x)
    assert close(op, got, rounded.double() @ q.dequantize().double().T)
    assert not close(op, got, x.double() @ q.dequantize().double().T)


@pytest.mark.parametrize(("wanted", "rows"), [(None, [0, 1, 2, 3]), (1, [0, 3])])
def test_lm_head_takes_the_rows_that_want_logits(wanted, rows):
    op, x, weight = LMHead(w("w", 33, 16)), torch.randn(4, 16).bfloat16(), torch.randn(33, 16).bfloat16()
    batch = make_batch([Query([1], 3, [0], wanted), Query([2, 3, 4], 0, [1], wanted)], block_tokens=8, device="cpu")
    got = bound(op, {"w": weight}, dtype=BF16)(x, batch)
    assert close(op, got, x[rows].double() @ weight.double().T, F32)


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_silu_mul(scale):
    x = torch.randn(5, 64) * scale
    assert close(SiluMul(), bound(SiluMul())(x), silu(x[:, :32].double()) * x[:, 32:].double())


def test_gated_mlp():
    op = GatedMLP(Linear(Weight(("gate", "up"), (96, 64))), Linear(w("down", 64, 48)))
    t = {"gate": torch.randn(48, 64) / 8, "up": torch.randn(48, 64) / 8, "down": torch.randn(64, 48) / 7}
    x, d = torch.randn(5, 64), {name: v.double() for name, v in t.items()}
    h = x.double()
    want = (silu(h @ d["gate"].T) * (h @ d["up"].T)) @ d["down"].T
    assert close(op, bound(op, t)(x), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_multiplies_complex_numbers(interleaved, dtype):
    weight, turn = rope_table(32)
    op = Rope(weight, interleaved)
    x = torch.randn(6, 3, 48).to(dtype)[..., 8:40]
    positions = torch.tensor([0, 1, 2, 599, 77, 77])
    want = rotate(x, turn[positions][:, None], interleaved=interleaved)
    got = bound(op, dtype=dtype)(x, positions)
    assert close(op, got, want, dtype) and got.is_contiguous()
    assert torch.equal(got[0], x[0]), "position 0 turns nothing"


def test_rope_makes_products_depend_on_distance_only():
    weight, _ = rope_table(64)
    rope = bound(Rope(weight))
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    near, far = ((rope(q, torch.tensor([p])) * rope(k, torch.tensor([p - 13]))).sum() for p in (20, 500))
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)


def test_all_reduce_alone_is_nothing():
    x = torch.randn(3, 4)
    assert bound(AllReduce(1))(x) is x


def test_all_reduce_without_a_group_says_so():
    with pytest.raises((RuntimeError, ValueError), match=r"[Pp]rocess group"):
        bound(AllReduce(2))(torch.randn(3, 4))
