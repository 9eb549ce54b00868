"""A cache in int8 on native kernels: what is written, what attention reads, alone and within whole layers."""

from dataclasses import replace

import pytest
import torch

from inferplane.binding import run_case
from inferplane.binding.check import Bench
from inferplane.conformance import stepping
from inferplane.ops import OPS, CausalLM, Draw
from inferplane.types import Context
from inferplane_cpu.backend import CpuBackend
from inferplane_cpu.kernels import attention, kernels
from inferplane_cpu.kvcache import layouts
from inferplane_cpu.native import instruction_sets, native, use_instruction_set
from tests.unit.support.small import tiny_llama

from .test_layers import EACH, LENGTHS, SCHEDULES, SMALL, bound_model, latents_and_experts

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
FEATURES = CpuBackend().features()
INT8 = next(x for x in layouts() if x.kv_dtype == "int8")
BENCH = Bench("cpu", "cpu", torch.bfloat16, FEATURES, lambda request: layouts(), INT8.name)
KERNELS = [k for k in kernels() if INT8.name in k.when.kv_layouts and not FEATURES.lacking(k.when.features)]


def served(kernel):
    """The samples of its op that a kernel takes with a cache in int8."""
    for sample in OPS[kernel.op].samples():
        context = Context(torch.bfloat16, sample.step_kind, dict.fromkeys(sample.op.kv_requests(), INT8), FEATURES)
        if not kernel.refusals(sample.op, context, sample.op.formats()):
            yield pytest.param(kernel, sample, id=f"{kernel.name}-{sample.label}")


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("kernel", "sample"), [case for kernel in KERNELS for case in served(kernel)])
def test_against_the_oracle(kernel, sample, name):
    with use_instruction_set(name):
        for seed in (31, 32):
            outcome = run_case(kernel, sample, BENCH, seed=seed)
            assert outcome.passed, outcome


class View:
    """An attention site's fields."""

    def __init__(self, op):
        self.heads, self.kv, self.scale = op.heads, op.kv, op.scale
        self.sinks, self.softcap = op.sinks, op.softcap


def drawn(op, sequences, seed, wild):
    """A step's queries and its cache, written through the layout; `wild`: some columns and tokens far larger."""
    host = torch.device("cpu")
    draw = Draw(seed, torch.bfloat16, "cpu", lambda request, blocks: INT8.build(request, blocks, torch.bfloat16, host))
    batch, kv = draw.step(op.kv, sequences, written=True)
    q = draw.normal(batch.tokens, op.heads, op.kv.dim)
    if wild:
        q[..., :: op.kv.dim // 3] *= 100
        for scales in kv.scales:
            scales[:: max(1, len(scales) // 7)] *= 30
    return q, batch, kv


def exactly(op, q, batch, kv):
    """Attention over the entries times their scales, in double."""
    out = torch.empty(q.shape[0], op.heads, op.kv.v_dim, dtype=torch.double)
    for first, last, n, table in batch.rows():
        slots = (table[:, None].long() * kv.block_tokens + torch.arange(kv.block_tokens)).flatten()[:n]
        pairs = zip(kv.entries, kv.scales, strict=True)
        entries = (e[slots].double() * s[slots].double().nan_to_num()[..., None] for e, s in pairs)
        k, v = (t.repeat_interleave(op.heads // op.kv.heads, 1) for t in entries)
        position = torch.arange(n - (last - first), n)[:, None]
        distance = position - torch.arange(n)[None]
        seen = (distance >= 0) & (distance < (op.kv.window or n))
        scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), k) * op.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def of_one(op, q, batch, kv, i):
    """What sequence `i` is given in a step of its own."""
    first, last, *_ = list(batch.rows())[i]
    start, only = torch.tensor([0, last - first], dtype=torch.int32), slice(i, i + 1)
    one = replace(batch, query_start=start, seq_lens=batch.seq_lens[only], block_tables=batch.block_tables[only])
    return attention.attention(View(op), q[first:last], one, kv)


SEQUENCES = [(1, 0), (1, 300), (3, 40), (8, 255), (2, 17)]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("sizes", [(1, 1, 17, 5), (6, 2, 64, 64), (7, 1, 96, 33), (32, 2, 40, 72)])
def test_attention_of_odd_sizes(name, sizes, window, wild):
    heads, kv_heads, dim, v_dim = sizes
    sample = OPS["attention"].samples()[0].op
    request = replace(sample.kv, heads=kv_heads, dim=dim, v_dim=v_dim, window=window)
    op = replace(sample, heads=heads, kv=request, scale=dim**-0.5)
    q, batch, kv = drawn(op, SEQUENCES, heads, wild)
    want = exactly(op, q, batch, kv)
    with use_instruction_set(name):
        got = attention.attention(View(op), q, batch, kv)
        # Rounding to bfloat16; and queries are rounded to 2^-16 of their largest entry, which scores are off by.
        keys = (kv.entries[0].double() * kv.scales[0].double().nan_to_num()[..., None]).norm(dim=-1).amax()
        scores = 2**-16 * q.double().abs().amax() * keys * op.scale
        room = 2**-8 * want.abs() + (2**-9 + scores) * want.abs().amax()
        assert ((got - want).abs() <= room).all(), ((got - want).abs() / room).max()
        alone = [of_one(op, q, batch, kv, i) for i in range(len(SEQUENCES))]
    assert torch.equal(got, torch.cat(alone))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("tree", ["grouped", "latents"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whole_layers_write_and_read_what_smaller_kernels_do(name, tree, schedule):
    """One call for all layers, layer by layer, and in parts: to the last bit of every cache."""
    made = tiny_llama() if tree == "grouped" else latents_and_experts("plain")
    weights = stepping.draw_weights(made, torch.bfloat16, steady_routes=True)
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 97, (n - 1,), generator=draw).tolist() for n in LENGTHS["ragged"]]
    found = []
    with use_instruction_set(name):
        for without in ((), EACH, SMALL):
            bound = bound_model(made, weights, 40, without, "int8")
            logits = stepping.run(bound, prompts, SCHEDULES[schedule])
            found.append((logits, [t for kv in bound.cache.layers for t in (*kv.entries, *kv.scales)]))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, other)
    for one, small in zip(found[0][0], found[2][0], strict=True):
        assert (one - small).abs().max() <= CausalLM.tolerance[torch.bfloat16] * small.abs().max()
    slots = slice(0, -1)  # the last is for padding
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one[slots], other[slots])
    first = 2 if tree == "grouped" else 1  # the first layer sees the same inputs in all three ways
    for one, small, kind in zip(found[0][1], found[2][1], [*(["entries"] * first), *(["scales"] * first)]):
        assert torch.equal(one[slots], small[slots]), kind


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("wild", [float("nan"), float("inf")])
@pytest.mark.parametrize("tree", ["grouped", "latents"])
def test_a_token_that_is_not_finite_has_zeros_and_no_scale(name, tree, wild):
    """As the layout writes it; other tokens' entries are theirs."""
    made = tiny_llama() if tree == "grouped" else latents_and_experts("plain")
    weights = stepping.draw_weights(made, torch.bfloat16, steady_routes=True)
    weights[id(made.embed.weight)][7, 3] = wild
    prompt, found = [[3, 5, 7, 11]], []
    with use_instruction_set(name):
        for without in ((), SMALL):
            bound = bound_model(made, weights, 40, without, "int8")
            stepping.run(bound, prompt, lambda sequence, done, total: 2)
            first = bound.cache.layers[0]  # what later layers read depends on attention's treatment of NaN
            found.append([t[:-1] for t in (*first.entries, *first.scales)])
    for one, small in zip(*found, strict=True):
        assert torch.allclose(one.float(), small.float(), rtol=0, atol=0, equal_nan=True)
    half = len(found[0]) // 2
    for entries, scales in zip(found[0][:half], found[0][half:], strict=True):
        broken = ~scales.isfinite()
        assert broken.any(-1).sum() == 1 and broken.sum() == scales.shape[-1] and (scales[~broken] > 0).sum() > 2
        assert not entries[broken.any(-1)].any() and entries[~broken.any(-1)].any()
