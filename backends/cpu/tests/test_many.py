"""Native kernels for many tokens, on every instruction set with tiles: against exact products and those for few."""

from dataclasses import replace

import pytest
import torch

from inferplane.binding import View, run_case
from inferplane.binding.check import Bench
from inferplane.kernels.composed.padding import pad_rows
from inferplane.ops import OPS, Draw, encode
from inferplane.types import HOST, KVRequest
from inferplane_cpu.backend import CpuBackend
from inferplane_cpu.kernels import kernels, moe
from inferplane_cpu.kernels.attention import LAYOUTS, attention, attention_many
from inferplane_cpu.kernels.linear import multiply, multiply_many_rows, multiply_on_tiles
from inferplane_cpu.kernels.packing import PANEL_FORMATS, Panels, matrices
from inferplane_cpu.kvcache import layouts
from inferplane_cpu.native import FASTER_THAN_ONEDNN, TILES, instruction_sets, native, use_instruction_set

SETS = [name for name in TILES if name in instruction_sets()]
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
SIZES = [(1, 33, 96), (17, 70, 40), (65, 1, 7), (70, 33, 257), (100, 200, 320), (130, 65, 513), (530, 48, 1000)]
SEQUENCES = {
    "whole": [(70, 0)],
    "chunk": [(130, 300)],
    "ragged": [(1, 40), (3, 300), (9, 0), (65, 17), (300, 0)],
}
LAYERS = {
    "native:decoder_layer_many": "gqa_mlp_qk_norm",
    "native:decoder_layer_many_panels": "gqa_mlp_int8_mixed",
    "native:decoder_layer_many_w8a8": "gqa_mlp_int8_row_mixed",
}


@pytest.fixture(autouse=True, params=SETS)
def tiles(request):
    with use_instruction_set(request.param):
        yield request.param


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("format", ["plain", *PANEL_FORMATS, "fp8_block"])
def test_products(format, m, n, k, tiles):
    draw = torch.Generator().manual_seed(m)
    w, x = torch.randn(n, k, generator=draw), torch.randn(m, k, generator=draw).bfloat16()
    weight = values = w.bfloat16()
    if format != "plain":
        q = encode(w, format)
        exact = tiles == "avx2"  # else entries are rounded to bf16 before they are multiplied
        values = q.dequantize(torch.float32 if exact else torch.bfloat16)
        weight = q if format == "fp8_block" else Panels(q)
    bias = torch.randn(n, generator=draw).bfloat16()
    matrix = matrices(weight, bias)[0]
    want = x.double() @ values.double().T + bias.double()
    room = (k + 4) * 2**-24 * (x.double().abs() @ values.double().abs().T + bias.double().abs())
    for dtype in (torch.float32, torch.bfloat16):
        y = torch.full((m, n), float("nan"), dtype=dtype)
        assert multiply_on_tiles(matrix, x, y)
        rounding = want.abs() * 2**-8 if dtype is torch.bfloat16 else 0
        assert ((y - want).abs() <= room + rounding).all(), dtype


@pytest.mark.parametrize(("n", "k"), [(16, 32), (64, 100), (144, 1000)])
def test_a_row_alone_is_the_same_row_among_many(n, k):
    draw = torch.Generator().manual_seed(n)
    w = matrices(torch.randn(n, k, generator=draw).bfloat16())[0]
    x = torch.randn(150, k, generator=draw).bfloat16()
    alone = torch.cat([multiply(w, row[None], True) for row in x])
    assert torch.equal(multiply(w, x, True), alone)
    assert torch.equal(multiply(w, x, False), alone.bfloat16())


@pytest.mark.parametrize("format", ["plain", "int8_group", "int4_group", "fp8_block"])
def test_every_number_of_rows_gives_a_row_its_bits(format):
    n, k, most = 40, 300, 130
    draw = torch.Generator().manual_seed(k)
    w = torch.randn(n, k, generator=draw)
    w[3, 5], w[17] = 1e4, 0.0
    weight = w.bfloat16() if format == "plain" else encode(w, format)
    matrix = matrices(Panels(weight) if format in PANEL_FORMATS else weight)[0]
    x, all_rows = torch.randn(most, k, generator=draw).bfloat16(), torch.empty(most, n)
    assert multiply_on_tiles(matrix, x, all_rows)
    for m in range(1, most):
        y = torch.full((m, n), float("nan"))
        assert multiply_on_tiles(matrix, x[:m], y)
        assert torch.equal(y, all_rows[:m]), m


@pytest.mark.skipif("avx512_bf16" not in SETS, reason="not run: no AVX-512 with BF16")
def test_without_amx_many_rows_of_a_bf16_weight_are_onednns():
    draw = torch.Generator().manual_seed(5)
    w, x = torch.randn(200, 3000, generator=draw).bfloat16(), torch.randn(64, 3000, generator=draw).bfloat16()
    native = torch.empty(64, 200, dtype=torch.bfloat16)
    with use_instruction_set("avx512_bf16"):
        found = multiply_many_rows(View(weight=w, prepared=None), x, None)
        assert multiply_on_tiles(matrices(w)[0], x, native)
    assert torch.equal(found, torch.nn.functional.linear(pad_rows(x), w)) and not torch.equal(found, native)


@pytest.mark.parametrize("isa", [name for name in FASTER_THAN_ONEDNN if name in SETS])
def test_where_onednn_is_behind_it_gets_no_rows(isa, monkeypatch):
    w, x = torch.randn(200, 3000).bfloat16(), torch.randn(64, 3000).bfloat16()
    monkeypatch.setattr(torch.nn.functional, "linear", None)
    with use_instruction_set(isa):
        assert multiply_many_rows(View(weight=w, prepared=None), x, None).shape == (64, 200)


def test_many_tokens_of_bf16_experts_are_onednns_but_on_avx2(tiles, monkeypatch):
    asked = []
    monkeypatch.setattr(moe, "moe_experts_torch", lambda p, x, weights, ids: asked.append(len(x)))
    site = View(gate_up=torch.randn(2, 64, 32).bfloat16(), down=torch.randn(2, 32, 32).bfloat16(), prepared=None)
    for m in (moe.FEW_ROWS, moe.FEW_ROWS + 1):
        moe.moe_experts(site, torch.randn(m, 32).bfloat16(), torch.ones(m, 1), torch.zeros(m, 1, dtype=torch.int64))
    assert asked == ([] if tiles == "avx2" else [moe.FEW_ROWS + 1])


def named(name):
    return next(k for k in kernels() if k.name == name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("label", ["decode_d128_mqa", "prefill", "window_prefill", "mha_d32"])
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_attention(label, sequences, layout):
    sample = next(s for s in OPS["attention"].samples() if s.label == label)
    op = replace(sample.op, queries="many")

    def inputs(d: Draw):
        batch, kv = d.step(op.kv, sequences, written=True)
        return d.normal(batch.tokens, op.heads, op.kv.dim), batch, kv

    judge("native:attention_many", replace(sample, op=op, inputs=inputs, step_kind="mixed"), layout)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("wrong", ["key", "value", "query"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(("n", "at"), [(75, 40), (75, 41), (330, 131), (330, 300)])
def test_numbers_that_are_not_finite_reach_whoever_sees_them_alone(n, at, number, wrong, window, tiles):
    """In even and odd keys, early and late in a span, with and without a span behind it."""
    request = KVRequest("gqa", 2, 32, 32, window)
    batch, kv = Draw(
        1, torch.bfloat16, build_kv=lambda r, blocks: layouts()[0].build(r, blocks, torch.bfloat16, HOST)
    ).step(request, [(n, 0)])
    q, k, v = (
        torch.rand(n, heads, 32, generator=torch.Generator().manual_seed(heads)).bfloat16() for heads in (4, 2, 2)
    )
    {"query": q, "key": k, "value": v}[wrong][at, 0, 3] = -number
    kv.write(batch.slots, k, v)
    site = View(heads=4, kv=request, scale=0.3, sinks=None, softcap=None)
    many, few = attention_many(site, q, batch, kv), attention(site, q, batch, kv)
    seen = torch.zeros(n, dtype=torch.bool)
    seen[at : n if window is None else at + window] = True
    if wrong == "query":
        seen[at + 1 :] = False
    if wrong == "key" and number == float("inf"):
        seen[:] = False  # its weight is zero, where a query is positive
    heads = slice(0, 1) if wrong == "query" else slice(0, 2)
    assert torch.equal(~many[:, heads].isfinite().flatten(1).all(1), seen)
    assert torch.equal(many.isfinite(), few.isfinite())
    assert torch.allclose(many.nan_to_num(0, 0, 0), few.nan_to_num(0, 0, 0), atol=0.01)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", LAYERS)
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_layers(kernel, sequences, layout):
    sample = next(s for s in OPS["decoder_layer"].samples() if s.label == LAYERS[kernel])
    judge(kernel, with_steps(sample, sequences), layout)


@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_layers_of_fp8_blocks(sequences):
    sample = next(s for s in OPS["decoder_layer"].samples() if s.label == "gqa_mlp_mixed")

    def fp8(linear):
        return replace(linear, weight=replace(linear.weight, format="fp8_block"))

    attn, mlp = sample.op.attn, sample.op.mlp
    attn = replace(attn, qkv=fp8(attn.qkv), o=fp8(attn.o))
    op = replace(sample.op, attn=attn, mlp=replace(mlp, gate_up=fp8(mlp.gate_up), down=fp8(mlp.down)))
    judge("native:decoder_layer_many", with_steps(replace(sample, op=op), sequences), LAYOUTS[0])


def with_steps(sample, sequences):
    """A sample of a layer, for a step of these sequences."""
    request = sample.op.attn.few.kv

    def inputs(d: Draw):
        batch, kv = d.step(request, sequences)
        x = d.normal(batch.tokens, 64)
        return x, d.normal(*x.shape), batch, kv

    return replace(sample, inputs=inputs)


def judge(kernel, sample, layout):
    bench = Bench("cpu", "cpu", torch.bfloat16, CpuBackend().features(), lambda request: layouts(), layout)
    for seed in (21, 22):
        outcome = run_case(named(kernel), sample, bench, seed=seed)
        assert outcome.passed, outcome
