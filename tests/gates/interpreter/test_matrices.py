"""Matrix kernels in Triton's interpreter: the ops' samples, shapes that fill no tile, outliers, uneven experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inferplane.binding import Bench, run_case
from inferplane.kernels.triton import Product, Products, matrix_kernels
from inferplane.ops import (
    OPS,
    ActivationMul,
    ClampedExperts,
    GatedMLP,
    Linear,
    LMHead,
    MoE,
    MoEExperts,
    MoERoute,
    Quantize,
    Sample,
    SiluMul,
    encode,
    placeholder,
)
from inferplane.ops.formats import MXFP4_VALUES
from inferplane.ops.op import relative_error
from inferplane.plugin import HOST, Features, QTensor, Weight
from inferplane.types.batch import Query, make_batch
from tests.gates.interpreter.benches import DTYPES

PRODUCTS = Products(Product(16, 32), Product(32, 32), Product(64, 32), programs=12, fp8=True)
KERNELS = {f"{k.op} {k.provider}": k for k in matrix_kernels(PRODUCTS.prepare)}
BENCH = Bench("interpreter", HOST, torch.bfloat16, Features(["triton", "fp8", "int8-dot"]), lambda request: ())
WIDE_ROWS = (1, 17, 130)


def verify_on_device(kernel: Any, sample: Sample, dtype: torch.dtype, record: Any) -> None:
    outcome = run_case(kernel, sample, replace(BENCH, dtype=dtype), seed=3, poisoned=True)
    assert outcome.served, outcome.detail
    record("op", kernel.op)
    record("kernel", kernel.name)
    record("error", outcome.error)
    record("tolerance", outcome.tolerance)
    assert outcome.passed, f"{outcome.error} > {outcome.tolerance} {outcome.detail}\n{outcome.traceback}"


def served(kernel: Any, sample: Sample, dtype: torch.dtype) -> bool:
    from inferplane.types import Context

    context = Context(dtype, "mixed", {}, BENCH.features)
    return not kernel.refusals(sample.op, context, sample.op.formats())


SMALL = ("int4_group32", "int8_act", "fp8_act", "fp8_ragged", "t13", "v3", "mixtral")
"""Samples that are run in every dtype, the others in bfloat16."""
CASES = [
    pytest.param(name, sample, dtype, id=f"{name.replace(' ', '-')}-{sample.label}-{dtype}")
    for name, kernel in KERNELS.items()
    for sample in OPS[kernel.op].samples()
    for dtype in (DTYPES if sample.label in SMALL else ("bfloat16",))
    if served(kernel, sample, DTYPES[dtype])
]


@pytest.mark.parametrize(("name", "sample", "dtype"), CASES)
def test_agrees_with_the_oracle(name, sample, dtype, record_property):
    verify_on_device(KERNELS[name], sample, DTYPES[dtype], record_property)


def test_every_kernel_has_samples_or_cases_of_its_own():
    names = {case.values[0] for case in CASES}
    assert names >= {name for name in KERNELS if not name.startswith("gated_mlp")}


def rows(count: int, width: int, outliers: bool) -> Any:
    """Activations; with outliers, every 53rd column 30 times as large as the others."""

    def draw(d: Any) -> tuple[torch.Tensor]:
        x = d.normal(count, width)
        if outliers:
            x[:, ::53] *= 30
        return (x,)

    return draw


LINEARS = {
    "fp8_block": ({}, "linear triton"),
    "fp8_block_act": ({"activation_quant": Quantize("fp8", 128), "activation_group": 128}, "linear triton"),
    "fp8_row": ({}, "linear triton"),
    "fp8_row_act": ({"activation_quant": Quantize("fp8", 0)}, "linear triton"),
    "fp8_block_coded": ({}, "linear triton_fp8"),
    "fp8_row_coded": ({}, "linear triton_fp8"),
    "int4_group_coded": ({}, "linear triton_fp8"),
    "int4_group64_coded": ({}, "linear triton_fp8"),
    "int4_group32_coded": ({}, "linear triton_fp8"),
    "int4_row_coded": ({}, "linear triton_fp8"),
    "int8_row_coded": ({}, "linear triton_int8"),
    "int8_group_coded": ({}, "linear triton_int8"),
    "int8_row": ({}, "linear triton"),
    "int8_row_act": ({"activation_quant": Quantize("int8", 0)}, "linear triton"),
    "int8_group": ({}, "linear triton"),
    "int4_group": ({}, "linear triton"),
    "int4_group64": ({}, "linear triton"),
    "int4_group64_act": ({"activation_quant": Quantize("fp8", 128), "activation_group": 128}, "linear triton"),
    "int4_group32": ({}, "linear triton"),
    "int4_row": ({}, "linear triton"),
    "mxfp4": ({}, "linear triton"),
    "nvfp4": ({}, "linear triton"),
    "mxfp4_act": ({"activation_quant": Quantize("fp8", 128), "activation_group": 128}, "linear triton"),
}
FORMATS = ("fp8_block", "fp8_row", "int8_row", "int8_group", "int4_row", "int4_group", "int4_group64", "int4_group32")
WEIGHT_ONLY = (*FORMATS, "mxfp4", "nvfp4")
"""Formats beside activations that stay as they are."""
DEPTH = 328
"""No multiple of 128, of 64 or of 32."""


@pytest.mark.parametrize("outliers", [False, True], ids=["random", "outliers"])
@pytest.mark.parametrize("count", WIDE_ROWS)
@pytest.mark.parametrize("form", LINEARS)
def test_linear_of_odd_sizes(form, count, outliers, record_property):
    options, name = LINEARS[form]
    format = form.removesuffix("_act").removesuffix("_coded")
    weight = placeholder(40, DEPTH, format=format)
    op = Linear(weight, bias=placeholder(40), **options)
    sample = Sample(form, op, rows(count, DEPTH, outliers))
    verify_on_device(KERNELS[name], sample, torch.bfloat16, record_property)


@pytest.mark.parametrize(
    "form",
    [
        "fp8_block",
        "fp8_block_act",
        "int4_group",
        "int4_group64_coded",
        "int8_row_act",
        "int8_row_coded",
        "mxfp4",
        "nvfp4",
    ],
)
@pytest.mark.parametrize("count", [3, 80])
def test_linear_in_parts_of_its_depth(form, count, record_property):
    options, name = LINEARS[form]
    op = Linear(placeholder(24, 1160, format=form.removesuffix("_act").removesuffix("_coded")), **options)
    verify_on_device(KERNELS[name], Sample(form, op, rows(count, 1160, True)), torch.bfloat16, record_property)


@pytest.mark.parametrize(
    ("format", "group"), [("fp8_block", 128), ("fp8_row", 128), ("int4_group", 128), ("int4_group64", 64)]
)
@pytest.mark.parametrize("count", [1, 20])
def test_coding_in_the_product_is_coding_before_it(format, group, count):
    from inferplane.kernels.triton.linear import make_fp8_input, quantize_rows_to_fp8
    from inferplane.kernels.triton.matmul import matmul
    from inferplane.kernels.triton.weight_packing import pack

    generator = torch.Generator().manual_seed(8)
    x = (torch.randn(count, DEPTH, generator=generator) * 7).bfloat16()
    x[:, :128] = 0
    weight = pack(encode(torch.randn(40, DEPTH, generator=generator), format))
    few = make_fp8_input(x, weight, 128, PRODUCTS)
    assert few.quantize and few.scale is None
    got, want = matmul(few, weight, PRODUCTS), matmul(quantize_rows_to_fp8(x, group), weight, PRODUCTS)
    assert relative_error(got, want) < 2**-8  # a bfloat16 result's last place


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("zero", [False, True])
def test_every_int4_entry_is_an_fp8_number(gated, zero):
    """Columns of a unit matrix: what comes out is the weight, -8 too, to the last place. Zero points take 16 bits."""
    from inferplane.kernels.triton.matmul import matmul
    from inferplane.kernels.triton.matmul_input import make_quantized_input
    from inferplane.kernels.triton.weight_packing import pack

    entries = torch.arange(-8, 8).repeat(2, 8)[:, :128].to(torch.int8)
    scale = torch.tensor([[0.5, 2.0], [1.0, 3.0]])
    points = torch.tensor([[1.0, 0.0], [2.0, -3.0]]) if zero else None
    weight = QTensor(entries, scale, points, block=(1, 64), bits=4)
    eye = torch.eye(128).to(torch.float8_e4m3fn)
    got = matmul(
        make_quantized_input(eye, torch.full((128, 1), 2.0), 128, torch.bfloat16),
        pack(weight),
        PRODUCTS,
        None,
        torch.float32,
        "silu" if gated else "",
    )
    gate, up = want = weight.dequantize() * 2
    torch.testing.assert_close(
        got, (torch.nn.functional.silu(gate) * up)[:, None] if gated else want.t(), rtol=1e-6 if gated else 0, atol=0
    )


@pytest.mark.parametrize("count", [5, 70])
def test_int4_beside_fp8_is_multiplied_as_in_16_bits(count):
    """Both products are exact; the sums are in float32."""
    from inferplane.kernels.triton.linear import quantize_rows_to_fp8
    from inferplane.kernels.triton.matmul import matmul, tile_constants
    from inferplane.kernels.triton.weight_packing import pack

    weight, wide = pack(encode(torch.randn(40, DEPTH), "int4_group64")), replace(PRODUCTS, fp8=False)
    x = quantize_rows_to_fp8((torch.randn(count, DEPTH) * 5).bfloat16(), 128)
    assert tile_constants(x, weight, True)["FP8_DOT"] and not tile_constants(x, weight, False)["FP8_DOT"]
    got, want = (matmul(x, weight, how, out_dtype=torch.float32) for how in (PRODUCTS, wide))
    assert relative_error(got, want) < 1e-5


def test_mxfp4_is_multiplied_exactly_by_every_power():
    """All entries of e2m1 beside all exponents that leave a float32 finite, and beside the scale that is no number."""
    from inferplane.kernels.triton.matmul import matmul
    from inferplane.kernels.triton.matmul_input import make_plain_input
    from inferplane.kernels.triton.weight_packing import pack

    entries = torch.tensor([*MXFP4_VALUES, *(-v for v in MXFP4_VALUES)], dtype=torch.int8).repeat(252, 6)
    scale = torch.ldexp(torch.full((252, 3), 0.5), torch.arange(-127, 125)[:, None].expand(-1, 3))
    scale[200] = torch.nan
    weight = QTensor(entries, scale, block=(1, 32))
    x = torch.eye(96)[:64] + torch.eye(96)[32:]
    got = matmul(make_plain_input(x), pack(weight), PRODUCTS, out_dtype=torch.float32)
    want = x @ weight.dequantize().nan_to_num(0.0).t()
    assert got[:, 200].isnan().all() and torch.equal(got[:, :200], want[:, :200])
    assert torch.equal(got[:, 201:], want[:, 201:]) and want[:, 251].abs().max() > 2.0**124


@pytest.mark.parametrize("factor", [2.0**-9, 1 / 2688, 3e4])
def test_nvfp4_is_multiplied_as_its_values_are(factor):
    """All entries beside all scales of e4m3: exactly where the factor is a power of two, then scales take 16 bits."""
    from inferplane.kernels.triton.matmul import matmul
    from inferplane.kernels.triton.matmul_input import make_plain_input
    from inferplane.kernels.triton.weight_packing import pack

    narrow = torch.arange(1, 127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    entries = torch.tensor([*MXFP4_VALUES, *(-v for v in MXFP4_VALUES)], dtype=torch.int8).repeat(126, 3)
    scale = (narrow * factor / 2)[:, None].repeat(1, 3)
    scale[:, 2], scale[90, 1] = scale[:, 2].flip(0), torch.nan
    weight = QTensor(entries, scale, block=(1, 16))
    x = torch.eye(48)[:32] + torch.eye(48)[16:]
    packed = pack(weight)
    assert packed.scale.dtype is (torch.bfloat16 if factor == 2.0**-9 else torch.float32) and packed.depth == 32
    got = matmul(make_plain_input(x), packed, PRODUCTS, out_dtype=torch.float32)
    want = x @ weight.dequantize().nan_to_num(0.0).t()
    assert got[:, 90].isnan().all()
    assert torch.equal(got[:, :90], want[:, :90]) and torch.equal(got[:, 91:], want[:, 91:])


def test_int8_rows_are_summed_up_in_whole_numbers():
    """Sums beyond 2^24, which float32 would round with every part that is added."""
    from inferplane.kernels.triton.matmul import matmul
    from inferplane.kernels.triton.matmul_input import make_quantized_input
    from inferplane.kernels.triton.weight_packing import pack

    generator = torch.Generator().manual_seed(6)
    x, w = (torch.randint(60, 128, (n, 6000), generator=generator).to(torch.int8) for n in (5, 24))
    weight = QTensor(w, torch.ones(24, 1), block=(1, 6000))
    alone = replace(PRODUCTS, programs=1)
    got = matmul(
        make_quantized_input(x, torch.ones(5, 1), 0, torch.bfloat16), pack(weight), alone, out_dtype=torch.float32
    )
    assert torch.equal(got, (x.long() @ w.long().t()).float())


CODERS = {"fp8": "triton_fp8", "int4": "triton_fp8", "int8": "triton_int8"}
"""Which kernel codes activations, by what the weight's entries are."""


@pytest.mark.parametrize("outliers", [False, True], ids=["random", "outliers"])
@pytest.mark.parametrize("count", [1, 130])
@pytest.mark.parametrize(
    "form", [*WEIGHT_ONLY, "fp8_block_coded", "fp8_row_coded", "int4_group64_coded", "int4_row_coded", "int8_row_coded"]
)
def test_gated_mlp(form, count, outliers, record_property):
    verify_gated_mlp(form, SiluMul(), count, outliers, record_property)


@pytest.mark.parametrize("count", [3, 80])
@pytest.mark.parametrize("form", ["fp8_block", "int4_group32", "fp8_row_coded", "int4_group64_coded", "int8_row_coded"])
@pytest.mark.parametrize("function", ["gelu", "gelu_tanh", "relu2"])
def test_gated_mlp_of_other_activations(function, form, count, record_property):
    verify_gated_mlp(form, ActivationMul(function), count, False, record_property)


def verify_gated_mlp(form: str, act: Any, count: int, outliers: bool, record: Any) -> None:
    format = form.removesuffix("_coded")
    op = GatedMLP(Linear(placeholder(400, 136, format=format)), Linear(placeholder(72, 200, format=format)), act)
    kernel = KERNELS["gated_mlp " + ("triton" if form == format else CODERS[format.partition("_")[0]])]
    verify_on_device(kernel, Sample(form, op, rows(count, 136, outliers)), torch.bfloat16, record)


@pytest.mark.parametrize("outliers", [False, True], ids=["random", "outliers"])
@pytest.mark.parametrize("count", [1, 130])
@pytest.mark.parametrize("format", WEIGHT_ONLY)
def test_output_head(format, count, outliers, record_property):
    def draw(d: Any) -> tuple[Any, ...]:
        batch = make_batch([Query([1] * count, 0, [0], count)], block_tokens=256, device=d.device)
        return *rows(count, 200, outliers)(d), batch

    op = LMHead(placeholder(73, 200, format=format))
    verify_on_device(KERNELS["lm_head triton"], Sample(format, op, draw), torch.bfloat16, record_property)


def chosen(kind: str, tokens: int, experts: int, k: int) -> Any:
    def draw(d: Any) -> tuple[Any, ...]:
        ids = torch.stack([torch.tensor(d.permutation(experts)[:k]) for _ in range(tokens)])
        if kind == "one_for_all":
            ids = torch.full((tokens, 1), experts - 1)
        elif kind == "nobody":
            ids = torch.full((tokens, k), -1)
        elif kind == "half_elsewhere":
            ids = torch.where(ids < experts // 2, ids, -1)
        (x,) = rows(tokens, 136, kind == "outliers")(d)
        return x, d.uniform(tokens, ids.shape[1], low=0.1), ids.to(d.device)

    return draw


EXPERTS = [*((f, "triton") for f in ("plain", *WEIGHT_ONLY)), *((f, CODERS[f.partition("_")[0]]) for f in FORMATS)]
UNEVEN = [("fp8_block", "triton"), ("int4_group64", "triton"), ("fp8_block", "triton_fp8"),
          ("int4_group64", "triton_fp8"), ("int8_row", "triton"), ("int8_row", "triton_int8")]  # fmt: skip
ROUTINGS = [
    *((1, kind, *form) for form in EXPERTS for kind in ("even", "one_for_all")),
    *((50, kind, *form) for form in EXPERTS for kind in ("outliers", "one_for_all")),
    *((130, kind, *form) for form in UNEVEN for kind in ("even", "half_elsewhere", "nobody")),
]
"""Fifty tokens are many for nine experts, and few for one."""


@pytest.mark.parametrize(("tokens", "kind", "format", "provider"), ROUTINGS)
def test_experts(tokens, kind, format, provider, record_property):
    partial = kind in ("half_elsewhere", "nobody")
    op = MoEExperts(placeholder(9, 2 * 72, 136, format=format), placeholder(9, 136, 72, format=format), partial)
    sample = Sample(kind, op, chosen(kind, tokens, 9, 3))
    verify_on_device(KERNELS[f"moe_experts {provider}"], sample, torch.bfloat16, record_property)


CLAMPED = ("plain", "int4_group32", "mxfp4", "nvfp4")
MIXTURES = {"plain": ("plain", "plain"), "fp8": ("fp8_block", "fp8_block"), "int4_experts": ("fp8_block", "int4_group"),
            "fp8_rows": ("fp8_row", "fp8_row"), "int4_64_experts": ("fp8_block", "int4_group64"),
            "int4": ("int4_group64", "int4_group64"), "int8": ("int8_row", "int8_row")}  # fmt: skip


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("form", MIXTURES)
def test_mixture(form, tokens, record_property):
    """A whole layer, whose routing is decided by its bias: no rounding may choose other experts."""
    shared, format = MIXTURES[form]
    decided = Weight((), (6,), torch.float32, make=lambda: torch.arange(6.0) * 10)
    op = MoE(
        Linear(placeholder(6, 128), out_dtype=torch.float32),
        MoERoute(decided, 2, "sigmoid", least_sum=1.2, sum_eps=0.3),
        MoEExperts(placeholder(6, 256, 128, format=format), placeholder(6, 128, 128, format=format)),
        GatedMLP(Linear(placeholder(256, 128, format=shared)), Linear(placeholder(128, 128, format=shared))),
    )
    for provider in ("triton", *([CODERS[format.partition("_")[0]]] if form != "plain" else [])):
        sample = Sample(form, op, rows(tokens, 128, provider == "triton"))
        verify_on_device(KERNELS[f"moe {provider}"], sample, torch.bfloat16, record_property)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("format", CLAMPED)
def test_mixture_of_clamped_experts(format, tokens, record_property):
    """As gpt-oss has them: a router with a bias, which decides, and experts with biases and a clamped gate."""
    decided = Weight((), (6,), torch.float32, make=lambda: torch.arange(6.0) * 10)
    experts = ClampedExperts(
        placeholder(6, 192, 136, format=format),
        placeholder(6, 192),
        placeholder(6, 136, 96, format=format),
        placeholder(6, 136),
        alpha=1.702,
        limit=0.8,
    )
    op = MoE(Linear(placeholder(6, 136), decided, out_dtype=torch.float32), MoERoute(None, 2), experts)
    verify_on_device(
        KERNELS["moe triton"], Sample(format, op, rows(tokens, 136, False)), torch.bfloat16, record_property
    )


@pytest.mark.parametrize("here", [False, True], ids=["kernel", "in the product"])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 5), (7, 4), (90, 33)])
def test_pairs_are_dealt_once(tokens, experts, here):
    from inferplane.kernels.triton.experts.blocks import allocate_blocks, assign_blocks
    from inferplane.kernels.triton.experts.moe import multiply_grouped
    from inferplane.kernels.triton.matmul_input import make_plain_input
    from inferplane.kernels.triton.weight_packing import pack

    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(-1, experts, (tokens, 3), generator=generator)
    slots, owners = (allocate_blocks if here else assign_blocks)(ids, experts, 16)
    if here:
        x, w = torch.zeros(tokens, 16), torch.zeros(experts, 16, 16)
        multiply_grouped(
            make_plain_input(x), pack(w), (slots, owners), Product(16, 16), pairs=ids.numel(), top_k=3, assign_from=ids
        )
    used = owners >= 0
    held = slots.view(-1, 16)[used]
    flat = ids.flatten()
    real = held < flat.numel()
    assert sorted(held[real].tolist()) == torch.where(flat >= 0)[0].tolist()
    assert bool((flat[held[real].long()] == owners[used][:, None].expand_as(held)[real]).all())
    assert owners[used].tolist() == sorted(owners[used].tolist())


def test_masked_groups():
    from inferplane.kernels.triton.experts.blocks import assign_masked_blocks
    from inferplane.kernels.triton.experts.moe import multiply_grouped
    from inferplane.kernels.triton.matmul_input import make_plain_input
    from inferplane.kernels.triton.weight_packing import pack

    generator = torch.Generator().manual_seed(4)
    x, w = torch.randn(3 * 32, 64, generator=generator), torch.randn(3, 40, 64, generator=generator)
    counts = torch.tensor([0, 32, 5], dtype=torch.int32)
    got = multiply_grouped(
        make_plain_input(x), pack(w), assign_masked_blocks(counts, 32, 16), Product(16, 32), pairs=96
    ).data.view(3, 32, 40)
    for e, count in enumerate(counts.tolist()):
        want = x.view(3, 32, 64)[e, :count] @ w[e].t()
        torch.testing.assert_close(got[e, :count], want)


def test_counters_are_left_as_zeros():
    """So that the next launch, or a replay of this one, counts from the beginning."""
    from inferplane.kernels.triton.experts.blocks import assign_blocks
    from inferplane.kernels.triton.experts.moe import GroupedResult, PairSum, multiply_grouped
    from inferplane.kernels.triton.matmul import matmul
    from inferplane.kernels.triton.matmul_input import make_plain_input
    from inferplane.kernels.triton.weight_packing import pack

    products = PRODUCTS.prepare(None, None)
    x, w = torch.randn(3, 1200), torch.randn(40, 1200)
    for _ in range(2):
        torch.testing.assert_close(matmul(make_plain_input(x), pack(w), products), x @ w.t(), atol=1e-3, rtol=1e-4)
    ids, weights = torch.tensor([[0, 1], [1, 0], [1, 1]]), torch.rand(6)
    rows, experts = torch.randn(6, 24), torch.randn(2, 40, 24)
    want = (torch.einsum("pk,pnk->pn", rows, experts[ids.flatten()]) * weights[:, None]).view(3, 2, 40).sum(1)
    slots, owners = assign_blocks(ids, 2, 16)
    placed = rows.new_zeros(len(slots), 24)
    real = (owners >= 0).repeat_interleave(16) & (slots < 6)
    placed[real] = rows[slots[real].long()]
    for _ in range(2):
        pair_sum = PairSum(products.counters, 2)
        got = multiply_grouped(
            make_plain_input(placed),
            pack(experts),
            (slots, owners),
            Product(16, 32),
            GroupedResult(weights=weights, pair_sum=pair_sum),
            pairs=6,
        )
        torch.testing.assert_close(got.data, want, atol=1e-3, rtol=1e-4)
    assert not products.counters.of(torch.device("cpu"), 1).any()
