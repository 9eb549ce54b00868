"""Experts and gates with limits: against their bodies in all weight formats, row by row, with NaN and infinities."""

from dataclasses import replace

import pytest
import torch

from inferplane.binding import View
from inferplane.ops import ActivationMul, MoEExperts, MoERoute, encode
from inferplane.ops.hash_moe import HashRoute
from inferplane.types import PLAIN
from inferplane_cpu.kernels.moe import (
    hash_route,
    moe_experts,
    moe_experts_batch_invariant,
    moe_experts_panels,
    moe_route,
)
from inferplane_cpu.kernels.packing import PANEL_FORMATS, Panels
from inferplane_cpu.kernels.rowwise import activation_mul
from inferplane_cpu.native import instruction_sets, native, use_instruction_set

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
EXPERTS, WIDTH, INNER, TOP = 6, 128, 64, 3
LIMITED = {"input": True, "output": False}


def draw(seed):
    return torch.Generator().manual_seed(seed)


def experts(format, limit, limits_input):
    """An op of random experts in this format, as its body reads them, and the site of a kernel."""
    gate_up = torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=draw(1)) / 4
    down = torch.randn(EXPERTS, WIDTH, INNER, generator=draw(2)) / 8
    stacks = [gate_up.bfloat16(), down.bfloat16()] if format == PLAIN else [encode(w, format) for w in (gate_up, down)]
    op = MoEExperts(*stacks, limit=limit, limits_input=limits_input)
    read = [Panels(w) if format in PANEL_FORMATS else w for w in stacks]
    fields = {"act": "", "limit": limit, "limits_input": limits_input, "prepared": None}
    return op, View(gate_up=read[0], down=read[1], **fields)


def inputs(rows):
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw(i))[:TOP] for i in range(rows)])
    x = torch.randn(rows, WIDTH, generator=draw(3)).bfloat16()
    return x, torch.rand(rows, TOP, generator=draw(4)) + 0.1, ids


def kernel_of(format):
    return moe_experts_panels if format in PANEL_FORMATS else moe_experts_batch_invariant


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("limits_input", LIMITED.values(), ids=LIMITED)
@pytest.mark.parametrize("format", [PLAIN, "fp8_block", *PANEL_FORMATS])
def test_experts_with_limits(format, limits_input, name):
    op, site = experts(format, 0.4, limits_input)
    x, weights, ids = inputs(70)
    with use_instruction_set(name):
        got = kernel_of(format)(site, x, weights, ids)
    want = op(x.float(), weights, ids)
    assert (got - want).abs().max() <= 0.02 * want.abs().max()
    others = replace(op, limits_input=not limits_input), replace(op, limit=None, limits_input=False)
    assert all((other(x.float(), weights, ids) - want).abs().max() > 0.05 * want.abs().max() for other in others)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("format", [PLAIN, "int8_row", "mxfp4"])
def test_a_row_is_the_same_whoever_is_beside_it(format, name):
    _op, site = experts(format, 0.4, True)
    x, weights, ids = inputs(300)
    with use_instruction_set(name):
        whole = kernel_of(format)(site, x, weights, ids)
        for first, last in ((0, 1), (7, 9), (100, 180)):
            part = kernel_of(format)(site, x[first:last], weights[first:last], ids[first:last])
            assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize("name", SETS)
def test_many_rows_have_the_same_limits(name):
    """More rows than native products take are oneDNN's where it is faster."""
    op, site = experts(PLAIN, 0.4, True)
    x, weights, ids = inputs(300)
    with use_instruction_set(name):
        got = moe_experts(site, x, weights, ids)
    want = op(x.float(), weights, ids)
    assert (got - want).abs().max() <= 0.02 * want.abs().max()


@pytest.mark.parametrize("name", SETS)
def test_limits_out_of_reach_change_no_bit(name):
    x, weights, ids = inputs(9)
    with use_instruction_set(name):
        plain, far = (moe_experts_panels(experts("int8_row", limit, True)[1], x, weights, ids) for limit in (None, 1e9))
    assert torch.equal(plain, far)


@pytest.mark.parametrize("name", SETS)
def test_nan_is_not_limited(name):
    """Of a row with NaN all results are NaN; infinities are limited as other numbers are."""
    _op, site = experts(PLAIN, 0.4, True)
    x, weights, ids = inputs(5)
    x[1, 40] = torch.nan
    with use_instruction_set(name):
        got = moe_experts_batch_invariant(site, x, weights, ids)
    assert got[1].isnan().all() and got[[0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("limits_input", LIMITED.values(), ids=LIMITED)
@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("width", [1, 37, 64])
def test_activations_with_limits(width, function, limits_input, name):
    op = ActivationMul(function, limit=0.4, limits_input=limits_input)
    x = 3 * torch.randn(5, 2 * width, generator=draw(5)).bfloat16()
    x[1, 0], x[2, width], x[4, width] = torch.nan, torch.nan, -torch.inf
    x[3, 0] = torch.inf if limits_input else 1e30  # torch's gelu of infinity is NaN
    with use_instruction_set(name):
        got = activation_mul(op, x)
    want = op(x)
    assert torch.equal(got.isnan(), want.isnan()) and want.isnan().sum() == 2
    assert torch.allclose(got.float().nan_to_num(), want.float().nan_to_num(), rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("name", SETS)
def test_scores_over_all_logits(name):
    """Of sqrt(softplus): from where it is nearly 0 to where it is the root; the table's experts have the same ones."""
    logits = torch.linspace(-150, 120, 541)[None]
    want = torch.nn.functional.softplus(logits.double()).sqrt()
    route = MoERoute(None, 541, "sqrtsoftplus", renormalize=False)
    hashed = HashRoute(torch.arange(541, dtype=torch.int32)[None], renormalize=False)
    with use_instruction_set(name):
        weights, ids = moe_route(route, logits)
        own, chosen = hash_route(hashed, logits, torch.tensor([0]))
    assert torch.equal(chosen, torch.arange(541)[None])
    assert torch.equal(weights, own.gather(1, ids))
    assert ((own - want).abs() <= 1e-6 * want).all()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("score", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_tables_of_more_experts_than_a_router_chooses_from(score, name):
    table = torch.randint(0, 5000, (7, 3), generator=draw(8), dtype=torch.int32)
    op, logits = HashRoute(table, score, factor=2.5), torch.randn(9, 1500, generator=draw(9))
    ids = torch.arange(9) % 7
    with use_instruction_set(name):
        got = hash_route(op, logits, ids)
    want = op(logits, ids)
    assert torch.equal(got[1], want[1])
    assert torch.allclose(got[0], want[0], rtol=1e-5, atol=0)
