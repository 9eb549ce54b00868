"""Weights of 4 bits times activations of 8 or 4: the integers of the op `quantize`, the same bits on every instruction
set, and layers made of them."""

import pytest
import torch

from inferplane.conformance import stepping
from inferplane.conformance.subject import Subject
from inferplane.models import Build, Config, deepseek_v3, llama
from inferplane.ops import Quantize, encode
from inferplane.ops.formats import dequantize_rows
from inferplane.plugin import PLAIN, ActivationQuant
from inferplane.plugins import host
from inferplane.quant.online import quantize
from inferplane_cpu.kernels.linear import multiply, multiply_on_tiles
from inferplane_cpu.kernels.narrow_inputs import NARROW_INPUTS
from inferplane_cpu.kernels.packing import Panels, matrices, with_input
from inferplane_cpu.native import instruction_sets, native, use_instruction_set
from tests.unit.support.small import LLAMA, V3, WHOLE_MODEL

from .test_layers import EACH, LENGTHS, SCHEDULES, SMALL, bound_model
from .test_native import outliers

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
SIZES = [(1, 1), (5, 31), (16, 128), (33, 257), (70, 160), (130, 1000)]
PAIRS = [(narrow, format) for narrow in NARROW_INPUTS for format in narrow.weights]
IDS = [f"{narrow.name}-{format}" for narrow, format in PAIRS]


def normal(shape, draw):
    return torch.randn(shape, generator=draw).bfloat16()


def drawn(n, k, format, make=normal, rows=80):
    draw = torch.Generator().manual_seed(n * 1000 + k)
    return quantize(torch.randn(n, k, generator=draw), format), make((rows, k), draw)


@pytest.mark.parametrize("make", [outliers, normal])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize(("narrow", "format"), PAIRS, ids=IDS)
def test_products_are_those_of_the_ops_integers_in_all_heights(narrow, format, n, k, make):
    """In double; rows alone and among others, many at once, on every instruction set, to the last bit."""
    q, x = drawn(n, k, format, make)
    data, scale = Quantize(narrow.format, narrow.group)(x)
    rows = dequantize_rows(data, scale, narrow.group).double()
    want, size = rows @ q.dequantize().double().T, rows.abs() @ q.dequantize().double().abs().T
    weight = with_input(matrices(Panels(q)), narrow.number)[0]
    found = []
    for name in SETS:
        with use_instruction_set(name):
            for m in (*range(1, 34), 40, 64, 65, 80):
                got = multiply(weight, x[:m], True)
                assert ((got - want[:m]).abs() <= 2**-20 * size[:m]).all(), (name, m)
            narrowed = multiply(weight, x, False)
            many = torch.empty_like(narrowed)
            assert multiply_on_tiles(weight, x, many) and torch.equal(many, narrowed)
            found.append((got, narrowed))
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("narrow", NARROW_INPUTS, ids=lambda narrow: narrow.name)
def test_infinite_nan_and_zeros(narrow, name):
    q, x = drawn(33, 96, narrow.weights[0], rows=40)
    x[1, 40], x[3, 7], x[5] = float("nan"), float("inf"), 0
    weight = with_input(matrices(Panels(q)), narrow.number)[0]
    with use_instruction_set(name):
        for rows in (40, 6):
            y = multiply(weight, x[:rows], True)
            assert not torch.isfinite(y[[1, 3]]).any()
            assert torch.isfinite(y[[0, 2, 4, 5]]).all() and not y[5].any()


@pytest.mark.parametrize("narrow", NARROW_INPUTS, ids=lambda narrow: narrow.name)
def test_values_between_two_numbers_and_at_the_ends(narrow):
    """Ties, the largest entry and its negative, in a row whose scale is 1."""
    top = {"int8": 127.0, "int4": 7.5, "mxfp4": 6.0}[narrow.format]
    x = torch.cat((torch.arange(-24, 25) / 4, torch.tensor([top, -top, 2.5, 5.0]))).clamp(-top, top)
    x = torch.nn.functional.pad(x, (0, 11)).bfloat16()[None]
    weight = encode(torch.eye(64), narrow.weights[0])
    data, scale = Quantize(narrow.format, narrow.group)(x)
    want = dequantize_rows(data, scale, narrow.group) * weight.dequantize().diagonal()
    for name in SETS:
        with use_instruction_set(name):
            got = multiply(with_input(matrices(Panels(weight)), narrow.number)[0], x, True)
        assert torch.allclose(got, want, rtol=2**-20, atol=0), name


def tree_of(kind, narrow):
    def of(name):
        projection = name.endswith(("_proj.weight", "_mqa.weight")) and "kv_b" not in name
        return narrow.weights[0] if projection else PLAIN

    made, config = (llama, LLAMA) if kind == "grouped" else (deepseek_v3, V3)
    quants = {narrow.weights[0]: ActivationQuant(narrow.format, narrow.group)}
    return made(Build(Config(config), WHOLE_MODEL, of, positions=256, activation_quants=quants))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", ["grouped", "latents"])
@pytest.mark.parametrize("narrow", NARROW_INPUTS, ids=lambda narrow: narrow.name)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whole_layers_give_what_smaller_kernels_do(name, kind, narrow, schedule):
    """One call for all layers gives what layer by layer gives, and this nearly what the parts give: a rounding of
    16 bits may move an activation to the next integer."""
    tree = tree_of(kind, narrow)
    weights = stepping.draw_weights(tree, torch.bfloat16, steady_routes=True)
    draw = torch.Generator().manual_seed(6)
    prompts = [torch.randint(0, 97, (n - 1,), generator=draw).tolist() for n in LENGTHS["ragged"]]
    found = []
    with use_instruction_set(name):
        for without in ((), EACH, SMALL):
            bound = bound_model(tree, weights, 40, without)
            found.append(torch.cat(stepping.run(bound, prompts, SCHEDULES[schedule])))
    one, other, small = found
    assert torch.equal(one, other)
    assert (one - small).abs().max() <= narrow.error * small.abs().max()


@pytest.mark.parametrize("kind", ["grouped", "latents"])
@pytest.mark.parametrize("narrow", NARROW_INPUTS, ids=lambda narrow: narrow.name)
def test_kernels_are_taken_where_the_weights_ask(kind, narrow):
    subject = Subject.of(host(), "cpu", "bfloat16")
    plan = stepping.plan_for(subject, tree_of(kind, narrow), torch.bfloat16)
    for step in ("decode", "mixed"):
        bound = {c.label for _, op, c in plan.sites(step) if op.name in ("decoder_layer", "linear") and c.kernel}
        quantized = {label for label in bound if not label.endswith((":linear", ":linear_batch_invariant"))}
        assert quantized and all(label.endswith("_" + narrow.name) for label in quantized), (step, bound)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("narrow", NARROW_INPUTS, ids=lambda narrow: narrow.name)
def test_a_prompt_in_one_call_is_near_the_prompt_in_parts(isa, narrow):
    tree = tree_of("grouped", narrow)
    weights = stepping.draw_weights(tree, torch.bfloat16)
    prompt = [torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(7)).tolist()]
    with use_instruction_set(isa):
        whole, parts = (
            stepping.run(bound_model(tree, weights, 160, way), prompt, stepping.SCHEDULES["whole_prompt"])[0]
            for way in (EACH, SMALL)
        )
    assert (whole - parts).abs().max() <= narrow.error * parts.abs().max()
