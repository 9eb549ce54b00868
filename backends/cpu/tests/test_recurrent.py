"""Recurrent kernels on every instruction set: against the ops' bodies in odd sizes, however a prompt is cut, and blocks
in one call against their parts."""

from dataclasses import replace

import pytest
import torch

from inferplane.binding import Options, Plan, PlanSettings, Resolver, View, link
from inferplane.ops import (
    CausalConv1d,
    DeltaRuleGates,
    Draw,
    GatedDeltaRule,
    GatedRMSNorm,
    RecurrentBlock,
    SelectiveScan,
    SiluGate,
)
from inferplane.ops.recurrent.ragged import draw_batch
from inferplane.types import Context
from inferplane_cpu.backend import CpuBackend
from inferplane_cpu.kernels import kernels, recurrent
from inferplane_cpu.native import instruction_sets, native, use_instruction_set

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
BF16 = torch.bfloat16
SEQUENCES = [(1, 40), (1, 0), (2, 1), (3, 0), (8, 63), (9, 5), (67, 0), (66, 62)]
"""Steps that begin sequences and go on with them, of one token up to a chunk of the body and three more."""
CUTS = {"whole": [67], "ones": [1] * 67, "sevens": [7] * 9 + [4], "ragged": [60, 1, 5, 1]}


@pytest.fixture(autouse=True, params=SETS)
def isa(request):
    with use_instruction_set(request.param):
        yield request.param


def fields_of(op):
    return View(**dict(op.items()))


def numbers(draw, *shape, dtype=BF16, scale=1.0):
    return (torch.randn(*shape, generator=draw) * scale).to(dtype)


def make_rule(draw, heads, dims, by_channel=False):
    """The delta rule, a function that draws its inputs, and the shape of its state."""
    (groups, n), (k, v) = heads, dims
    op, rates = GatedDeltaRule(heads, dims, by_channel), n * k if by_channel else n

    def rows(tokens):
        x = numbers(draw, tokens, 2 * groups * k + n * v + 3)[:, 3:]
        q, key, value = x.split((groups * k, groups * k, n * v), 1)
        gates = -torch.rand(tokens, rates, generator=draw), torch.rand(tokens, n, generator=draw)
        return q.unflatten(1, (groups, k)), key.unflatten(1, (groups, k)), value.unflatten(1, (n, v)), *gates

    return op, recurrent.gated_delta_rule, rows, (n, k, v), torch.float32


def make_scan(draw, heads, dims):
    (groups, n), (dim, size) = heads, dims
    weights = (numbers(draw, n, dtype=torch.float32) for _ in range(3))
    op = SelectiveScan(*weights, groups, dim, size, (0.01, 2.0))

    def rows(tokens):
        x = numbers(draw, tokens, n * dim + 2 * groups * size + 5)[:, 5:]
        h, b, c = x.split((n * dim, groups * size, groups * size), 1)
        b, c = (t.unflatten(1, (groups, size)) for t in (b, c))
        return h.unflatten(1, (n, dim)), numbers(draw, tokens, n), b, c

    return op, recurrent.selective_scan, rows, (n, dim, size), torch.float32


def make_convolution(draw, channels, size):
    op = CausalConv1d(numbers(draw, channels, size), numbers(draw, channels), size != 3)
    rows = lambda tokens: (numbers(draw, tokens, channels + 7)[:, 7:],)  # noqa: E731
    return op, recurrent.causal_conv1d, rows, (channels, size - 1), BF16


CASES = {
    "rule_24_40": (make_rule, (1, 3), (24, 40)),
    "rule_one_head": (make_rule, (1, 1), (7, 1)),
    "rule_wide": (make_rule, (2, 4), (33, 130)),
    "rule_128": (make_rule, (1, 2), (128, 128)),
    "channels_24_40": (make_rule, (1, 3), (24, 40), True),
    "channels_one_head": (make_rule, (1, 1), (7, 1), True),
    "channels_128": (make_rule, (2, 2), (128, 128), True),
    "scan_24": (make_scan, (1, 3), (24, 24)),
    "scan_one_head": (make_scan, (1, 1), (1, 7)),
    "scan_groups": (make_scan, (2, 4), (40, 130)),
    "conv_4": (make_convolution, 300, 4),
    "conv_3": (make_convolution, 17, 3),
    "conv_2": (make_convolution, 257, 2),
    "conv_1": (make_convolution, 300, 1),
    "conv_6": (make_convolution, 5, 6),
}


def make(name):
    function, *sizes = CASES[name]
    return function(torch.Generator().manual_seed(len(name)), *sizes)


def close(got, want, tolerance):
    if got.shape != want.shape or not want.numel():
        return got.shape == want.shape
    return (got.float() - want.float()).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_against_the_body(name):
    """States of sequences that begin are not read: they hold NaN here."""
    op, kernel, rows, shape, dtype = make(name)
    batch = draw_batch(Draw(0, BF16), SEQUENCES)
    inputs, state = rows(batch.tokens), numbers(torch.Generator().manual_seed(1), len(SEQUENCES), *shape, dtype=dtype)
    state[[before == 0 for _, before in SEQUENCES]] = torch.nan
    held = state.clone()
    y, after = kernel(fields_of(op), *inputs, batch, state)
    want, states = op(*(x.float() for x in inputs), batch, state.float())
    assert y.dtype is BF16 and after.dtype is dtype
    assert torch.equal(state.nan_to_num(9), held.nan_to_num(9))
    assert close(y, want, 2**-8)
    assert close(after, states, 0 if dtype is BF16 else 1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cut", CUTS)
def test_a_prompt_has_the_same_bits_however_it_is_cut(name, cut):
    op, kernel, rows, shape, dtype = make(name)
    inputs, view = rows(67), fields_of(op)
    once, end = kernel(view, *inputs, draw_batch(Draw(0, BF16), [(67, 0)]), torch.zeros(1, *shape, dtype=dtype))
    state, before, parts = torch.full((1, *shape), torch.nan, dtype=dtype), 0, []
    for n in CUTS[cut]:
        batch = draw_batch(Draw(0, BF16), [(n, before)])
        y, state = kernel(view, *(x[before : before + n] for x in inputs), batch, state)
        parts.append(y)
        before += n
    assert torch.equal(torch.cat(parts), once)
    assert torch.equal(state, end)


@pytest.mark.parametrize("name", CASES)
def test_padding_is_skipped(name):
    """Rows of slot -1 first or last, and a padded sequence, whose state stays as it is."""
    op, kernel, rows, shape, dtype = make(name)
    batch = draw_batch(Draw(0, BF16), [(3, 9), (3, 0), (1, 4)])
    inputs, view = rows(7), fields_of(op)
    state = numbers(torch.Generator().manual_seed(1), 3, *shape, dtype=dtype)
    slots, lens = batch.slots.clone(), batch.seq_lens.clone()
    slots[[0, 5, 6]] = -1
    lens[:] = torch.tensor([11, 2, 0])
    y, after = kernel(view, *inputs, replace(batch, slots=slots, seq_lens=lens, host_lens=None), state)
    alone = draw_batch(Draw(0, BF16), [(2, 9), (2, 0)])
    want, states = kernel(view, *(x[1:5] for x in inputs), alone, state[:2])
    assert torch.equal(y[1:5], want)
    assert torch.equal(after, torch.cat((states, state[2:])))


@pytest.mark.parametrize("name", CASES)
def test_a_step_without_sequences(name):
    op, kernel, rows, shape, dtype = make(name)
    batch = draw_batch(Draw(0, BF16), [(1, 1)])
    none = replace(batch, query_start=batch.query_start[:1], seq_lens=batch.seq_lens[:0], slots=batch.slots[:0])
    y, after = kernel(fields_of(op), *rows(0), none, torch.empty(0, *shape, dtype=dtype))
    assert y.shape[0] == 0 and after.shape[0] == 0


@pytest.mark.parametrize("width", [1, 24, 130])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("act", ["silu", "sigmoid"])
def test_gated_norms(width, groups, gate_first, act):
    draw = torch.Generator().manual_seed(width)
    x, gate = numbers(draw, 5, 2, groups * width), numbers(draw, 5, 3, groups * width, scale=4.0)[:, :2]
    op = GatedRMSNorm(numbers(draw, groups * width), 1e-3, groups, gate_first, act=act)
    assert close(recurrent.gated_rms_norm(fields_of(op), x, gate), op(x.float(), gate.float()), 2**-8)
    assert close(
        recurrent.silu_gate(View(), x[:, 0], gate[:, 1]), SiluGate()(x[:, 0].float(), gate[:, 1].float()), 2**-8
    )


def test_gates():
    draw = torch.Generator().manual_seed(1)
    op = DeltaRuleGates(*(numbers(draw, 5, dtype=torch.float32) for _ in range(2)))
    a, b = numbers(draw, 20, 11, scale=20.0)[:, 1:].split(5, 1)
    for got, want in zip(recurrent.delta_rule_gates(fields_of(op), a, b), op(a.float(), b.float()), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("channels", [1, 19, 128])
def test_gates_by_channel(channels):
    """Also where softplus is its argument, where it is almost 0, and where its exponential has no bits."""
    draw = torch.Generator().manual_seed(1)
    op = DeltaRuleGates(numbers(draw, 3, dtype=torch.float32), numbers(draw, 3 * channels, dtype=torch.float32), True)
    a, b = numbers(draw, 20, 3 * channels + 4, scale=20.0)[:, 1:].split((3 * channels, 3), 1)
    a[0, 0], a[1, 0] = 120.0, -120.0
    for got, want in zip(recurrent.delta_rule_gates(fields_of(op), a, b), op(a.float(), b.float()), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-30)


def bound_block(op, weights, with_block):
    """The block bound to one native call, or to its parts."""
    features = CpuBackend().features()
    found = [k for k in kernels() if with_block or k.op != "recurrent_block"]
    settings = PlanSettings("cpu", BF16, features=features, max_repacked_fraction=None)
    plan = Plan(op, settings, {}, {"decode": Resolver(found, Context(BF16, "decode", {}, features), Options())})
    label = next(choice.label for site, _, choice in plan.sites("decode") if not site)
    assert label.startswith("native:recurrent_block") is with_block
    return link(plan, plan.pack(lambda i: weights[i]))["decode"]


BLOCKS = [sample for sample in RecurrentBlock.samples() if sample.step_kind == "decode"]


@pytest.mark.parametrize("sample", BLOCKS, ids=lambda sample: sample.label)
def test_a_block_in_one_call_gives_what_its_parts_give(sample):
    """To the bit, in steps that follow each other, between which the slots are exchanged."""
    draw = Draw(3, BF16)
    weights = {id(w): draw.weight(w) for _, w in sample.op.weights()}
    _, _, first = sample.inputs(draw)
    caches = first, first.copy_to("cpu")
    steps = [bound_block(sample.op, weights, whole) for whole in (True, False)]
    sequences, slots = [[1, 5], [1, 0], [3, 90]], draw.state_slots(3)
    for _ in range(3):
        batch = draw_batch(draw, [tuple(s) for s in sequences]).with_states(slots)
        x = draw.normal(batch.tokens, sample.op.mixer.width)
        one, other = (step(x, batch, kv) for step, kv in zip(steps, caches, strict=True))
        assert torch.equal(one, other)
        assert all(torch.equal(a, b) for a, b in zip(*(kv.tensors for kv in caches), strict=True))
        sequences = [[n, n + before] for n, before in sequences]
        slots = [type(s)(s.write, s.read) for s in slots]
