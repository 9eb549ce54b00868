"""Weights and activations in 8 bits: exact sums, the same bits on every instruction set, and layers made of them."""

import pytest
import torch

from inferplane.conformance import stepping
from inferplane.conformance.subject import Subject
from inferplane.models import Build, Config, deepseek_v3, llama
from inferplane.ops import Quantize, encode
from inferplane.plugin import PLAIN, ActivationQuant
from inferplane.plugins import host
from inferplane_cpu.kernels.linear import INT8_ACTIVATION_ERROR, multiply, multiply_on_tiles
from inferplane_cpu.kernels.packing import Panels, matrices, with_int8_activations
from inferplane_cpu.native import TILES, instruction_sets, native, use_instruction_set
from tests.unit.support.small import LLAMA, V3, WHOLE_MODEL

from .test_layers import EACH, LENGTHS, SCHEDULES, SMALL, bound_model
from .test_native import outliers

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
SIZES = [(1, 1), (5, 31), (16, 128), (33, 257), (70, 129), (130, 1000)]


def normal(shape, draw):
    return torch.randn(shape, generator=draw).bfloat16()


def drawn(n, k, rows, make):
    draw = torch.Generator().manual_seed(n * 1000 + k)
    q, x = encode(torch.randn(n, k, generator=draw), "int8_row"), make((rows, k), draw)
    return q, x, torch.randn(n, generator=draw).bfloat16()


@pytest.mark.parametrize("make", [outliers, normal])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_products_are_those_of_the_codes_in_all_heights(n, k, make):
    """Against the op's own codes, in double; rows alone and among others, on every instruction set, to the last bit."""
    q, x, bias = drawn(n, k, 80, make)
    data, scale = Quantize("int8", 0)(x)
    want = (data.double() @ q.data.double().T) * scale.double() * q.scale.double().T
    weight, biased = with_int8_activations(matrices(Panels(q)))[0], with_int8_activations(matrices(Panels(q), bias))
    found = []
    for name in SETS:
        with use_instruction_set(name):
            for m in (*range(1, 34), 40, 64, 65, 80):
                got = multiply(weight, x[:m], True)
                assert ((got - want[:m]).abs() <= 2**-21 * want[:m].abs()).all(), (name, m)
            narrow = multiply(biased[0], x, False)
            many = torch.empty_like(narrow)
            assert multiply_on_tiles(biased[0], x, many) and torch.equal(many, narrow)
            found.append((got, narrow))
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))
    room = 2**-8 * (want + bias.double()).abs() + 2**-21 * (want.abs() + bias.double().abs())
    assert ((narrow - (want + bias.double())).abs() <= room).all()


@pytest.mark.parametrize("name", SETS)
def test_many_rows_pass_in_parts(name):
    q, x, _ = drawn(50, 96, 1100, normal)
    weight = with_int8_activations(matrices(Panels(q)))[0]
    with use_instruction_set(name):
        whole = multiply(weight, x, True)
        assert torch.equal(whole, torch.cat([multiply(weight, part, True) for part in x.split(37)]))


@pytest.mark.parametrize("name", SETS)
def test_infinite_nan_and_zeros(name):
    q, x, _ = drawn(33, 96, 40, normal)
    x[1, 40], x[3, 7], x[5] = float("nan"), float("inf"), 0
    weight = with_int8_activations(matrices(Panels(q)))[0]
    with use_instruction_set(name):
        for rows in (40, 6):
            y = multiply(weight, x[:rows], True)
            assert not torch.isfinite(y[[1, 3]]).any()
            assert torch.isfinite(y[[0, 2, 4, 5]]).all() and not y[5].any()


def tree_of(kind, activation_quants):
    def of(name):
        projection = name.endswith(("_proj.weight", "_mqa.weight")) and "kv_b" not in name
        return "int8_row" if projection else PLAIN

    made, config = (llama, LLAMA) if kind == "grouped" else (deepseek_v3, V3)
    return made(Build(Config(config), WHOLE_MODEL, of, positions=256, activation_quants=activation_quants))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", ["grouped", "latents"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whole_layers_give_what_smaller_kernels_do(name, kind, schedule):
    """One call for all layers gives what layer by layer gives, and this what the parts give."""
    tree = tree_of(kind, {"int8_row": ActivationQuant("int8")})
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
    assert (one - small).abs().max() <= INT8_ACTIVATION_ERROR * small.abs().max()


@pytest.mark.parametrize("kind", ["grouped", "latents"])
def test_kernels_are_taken_where_the_weights_ask(kind):
    subject = Subject.of(host(), "cpu", "bfloat16")
    for activation_quants, ending in (({"int8_row": ActivationQuant("int8")}, "_w8a8"), ({}, "_panels")):
        plan = stepping.plan_for(subject, tree_of(kind, activation_quants), torch.bfloat16)
        for step in ("decode", "mixed"):
            bound = {c.label for _, op, c in plan.sites(step) if op.name in ("decoder_layer", "linear") and c.kernel}
            quantized = {label for label in bound if not label.endswith((":linear", ":linear_batch_invariant"))}
            assert quantized and all(label.endswith(ending) for label in quantized), (step, bound)


@pytest.mark.parametrize("isa", [name for name in TILES if name in SETS])
def test_a_prompt_in_one_call_is_near_the_prompt_in_parts(isa):
    tree = tree_of("grouped", {"int8_row": ActivationQuant("int8")})
    weights = stepping.draw_weights(tree, torch.bfloat16)
    prompt = [torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(7)).tolist()]
    with use_instruction_set(isa):
        whole, parts = (
            stepping.run(bound_model(tree, weights, 160, way), prompt, stepping.SCHEDULES["whole_prompt"])[0]
            for way in (EACH, SMALL)
        )
    assert (whole - parts).abs().max() <= INT8_ACTIVATION_ERROR * parts.abs().max()
