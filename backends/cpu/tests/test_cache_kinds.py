"""Attention by native kernels over caches in FP8 and in 4 bits: the values are those that the cache reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.binding import run_case
from inferplane.binding.check import Bench
from inferplane.conformance import stepping
from inferplane.engine import LLM
from inferplane.ops import OPS, CausalLM, Draw
from inferplane.plugin import KVRequest
from inferplane.types import Context
from inferplane_cpu.backend import CpuBackend
from inferplane_cpu.kernels import attention, kernels
from inferplane_cpu.kvcache import layouts
from inferplane_cpu.native import instruction_sets, native, use_instruction_set
from tests.e2e.tiny_models import llama_config
from tests.unit.support.small import tiny_llama

from .test_layers import EACH, LENGTHS, SCHEDULES, SMALL, bound_model

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
FEATURES = CpuBackend().features()
KINDS = {layout.kv_dtype: layout for layout in layouts() if layout.kv_dtype in ("fp8", "int4", "k8v4")}


def served(layout):
    """The samples of each kernel's op that it takes with the layout of its KV dtype that is on offer."""
    for kernel in kernels():
        if layout.name not in kernel.when.kv_layouts or FEATURES.lacking(kernel.when.features):
            continue
        for sample in OPS[kernel.op].samples():
            offered = {r: [x for x in layouts(r) if x.kv_dtype == layout.kv_dtype] for r in sample.op.kv_requests()}
            if not all(offered.values()):
                continue
            chosen = {request: found[0] for request, found in offered.items()}
            context = Context(torch.bfloat16, sample.step_kind, chosen, FEATURES)
            if not kernel.refusals(sample.op, context, sample.op.formats()):
                yield pytest.param(kernel, sample, layout, id=f"{layout.kv_dtype}-{kernel.name}-{sample.label}")


def test_every_kernel_has_a_sample():
    names = {layout.name for layout in KINDS.values()}
    found = {case.values[0].name for layout in KINDS.values() for case in served(layout)}
    known = [k for k in kernels() if not FEATURES.lacking(k.when.features) and OPS[k.op].samples()]
    assert found == {k.name for k in known if names & set(k.when.kv_layouts)}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("kernel", "sample", "layout"), [case for layout in KINDS.values() for case in served(layout)])
def test_against_the_oracle(kernel, sample, layout, name):
    offered = [x.name for r in sample.op.kv_requests() for x in layouts(r) if x.kv_dtype == layout.kv_dtype]
    pinned = layout.name if layout.name in offered or not offered else offered[0]  # larger blocks hold rates
    bench = Bench("cpu", "cpu", torch.bfloat16, FEATURES, lambda request: layouts(request), pinned)
    with use_instruction_set(name):
        outcome = run_case(kernel, sample, bench, seed=31)
        assert outcome.passed, outcome


class View:
    """An attention site's fields."""

    def __init__(self, op):
        self.heads, self.kv, self.scale = op.heads, op.kv, op.scale
        self.sinks, self.softcap = op.sinks, op.softcap


def over_values(op, q, batch, kv):
    """Attention over what the cache reads, in double."""
    out = torch.empty(q.shape[0], op.heads, op.kv.v_dim, dtype=torch.double)
    for first, last, n, table in batch.rows():
        k, v = (t.double().nan_to_num().repeat_interleave(op.heads // op.kv.heads, 1) for t in kv.read(table, n))
        position = torch.arange(n - (last - first), n)[:, None]
        distance = position - torch.arange(n)[None]
        seen = (distance >= 0) & (distance < (op.kv.window or n))
        scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), k) * op.scale
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
    return out


SHAPES = {
    "plain": (8, KVRequest("gqa", 2, 64, 64)),
    "one_head": (4, KVRequest("gqa", 1, 256, 256)),
    "tiles": (16, KVRequest("gqa", 2, 128, 128)),
    "window": (8, KVRequest("gqa", 4, 96, 96, window=37)),
    "k_v_differ": (6, KVRequest("gqa", 3, 96, 64)),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_those_that_the_cache_reads(shape, kv_dtype, name):
    """Few queries and many, long sequences and short, with channels that keys share: within bfloat16 of attention in
    double over the cache's own values."""
    heads, request = SHAPES[shape]
    op = next(s.op for s in OPS["attention"].samples())
    op = replace(op, heads=heads, kv=request, scale=request.dim**-0.5, sinks=None, softcap=None)
    layout, host = KINDS[kv_dtype], torch.device("cpu")
    draw = Draw(5, torch.bfloat16, "cpu", lambda r, blocks: layout.build(r, blocks, torch.bfloat16, host))
    for sequences in ([(1, 700), (1, 16), (1, 1)], [(3, 300), (7, 40)], [(64, 130), (33, 33)]):
        batch, kv = draw.step(op.kv, sequences, written=True)
        q = draw.normal(batch.tokens, op.heads, op.kv.dim)
        want = over_values(op, q, batch, kv)
        functions = [attention.attention] + [attention.attention_many] * (sequences[0][0] > 8)
        for function in functions:
            with use_instruction_set(name):
                got = function(View(op), q, batch, kv)
            assert (got.double() - want).abs().max() <= 0.02 * want.abs().max(), function.__name__


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_a_model_runs_on_them(kv_dtype):
    options = {"device": "cpu", "dtype": "bfloat16", "load_format": "dummy", "strict": True}
    config = llama_config(hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    with LLM(config, kv_cache_dtype=kv_dtype, **options) as llm:
        assert not llm.explain()["on_torch"]
        ids = list(range(1, 60))
        whole = torch.as_tensor(llm.logits([ids])[0])
    with LLM(config, **options) as llm:
        plain = torch.as_tensor(llm.logits([ids])[0])
    correlation = torch.corrcoef(torch.stack((whole.flatten(), plain.flatten())))[0, 1]
    assert correlation > 0.98 and not torch.equal(whole, plain)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kv_dtype", KINDS)
def test_other_sequences_change_nothing(kv_dtype, name):
    """A sequence's result alone is its result among others, bit by bit."""
    heads, request = SHAPES["plain"]
    op = next(s.op for s in OPS["attention"].samples())
    op = replace(op, heads=heads, kv=request, scale=0.1, sinks=None, softcap=None)
    layout, host = KINDS[kv_dtype], torch.device("cpu")
    draw = Draw(6, torch.bfloat16, "cpu", lambda r, blocks: layout.build(r, blocks, torch.bfloat16, host))
    batch, kv = draw.step(op.kv, [(1, 300), (2, 77), (1, 16)], written=True)
    q = draw.normal(batch.tokens, heads, 64)
    with use_instruction_set(name):
        together = attention.attention(View(op), q, batch, kv)
        for i, (first, last, *_) in enumerate(batch.rows()):
            only = slice(i, i + 1)
            start = torch.tensor([0, last - first], dtype=torch.int32)
            one = replace(
                batch, query_start=start, seq_lens=batch.seq_lens[only], block_tables=batch.block_tables[only]
            )
            assert torch.equal(attention.attention(View(op), q[first:last], one, kv), together[first:last])


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def held(bound):
    """The tensors of each layer's cache but for padding; ranges as numbers, since zeros have two signs."""
    for kv in bound.cache.layers:
        yield [t.float().nan_to_num(7.0) for t in kv.list_tensors()]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kv_dtype", ["int4", "k8v4"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whole_layers_write_and_read_what_smaller_kernels_do(name, kv_dtype, schedule):
    """One call for all layers, layer by layer, and in parts, of which torch writes: to the last bit of every cache."""
    made = tiny_llama(**HEADS)
    weights = stepping.draw_weights(made, torch.bfloat16)
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 97, (n - 1,), generator=draw).tolist() for n in LENGTHS["ragged"]]
    logits, caches = [], []
    with use_instruction_set(name):
        for without in ((), EACH, SMALL):
            bound = bound_model(made, weights, 40, without, kv_dtype)
            logits.append(stepping.run(bound, prompts, SCHEDULES[schedule]))
            caches.append(list(held(bound)))
    for one, other, small in zip(*logits, strict=True):
        assert torch.equal(one, other)
        assert (one - small).abs().max() <= CausalLM.tolerance[torch.bfloat16] * small.abs().max()
    for one, other in zip(caches[0], caches[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    # The first layer sees the same inputs in all three ways.
    assert all(torch.equal(a, b) for a, b in zip(caches[0][0], caches[2][0], strict=True))
    assert all(t.any() for t in caches[0][0])


@pytest.mark.parametrize("name", SETS)
def test_entries_of_all_sizes_are_written_as_torch_rounds_them(name):
    """Values of a head from its largest down through scales below float16's numbers, and heads of zeros; in prompts of
    many tokens, several spans of which are written in one step, and in steps of few."""
    made = tiny_llama(**HEADS)
    weights = stepping.draw_weights(made, torch.bfloat16)
    for key in {id(op.qkv.weight) for _, op in made.sites() if hasattr(op, "qkv")}:
        rows = weights[key]
        rows *= 2.0 ** -(torch.arange(len(rows)) // 4 % 24)[:, None]
        rows[-64:] = 0
    found = []
    with use_instruction_set(name):
        for without in ((), SMALL):
            bound = bound_model(made, weights, 70, without, "int4")
            stepping.run(bound, [list(range(69)), [3] * 20], SCHEDULES["drafts"])
            found.append(next(held(bound)))
    assert all(torch.equal(one, small) for one, small in zip(*found, strict=True))
