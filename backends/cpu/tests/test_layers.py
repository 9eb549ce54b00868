"""Whole layers as native calls: alone, all of a model in one, with what surrounds them, and made of smaller kernels."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from inferplane.binding import Options, PlanSettings, bind, view_of
from inferplane.conformance import stepping, test_models
from inferplane.conformance.configs import TINY, model
from inferplane.conformance.subject import Subject
from inferplane.models import Build, Config, deepseek_v3, llama
from inferplane.ops import CausalLM
from inferplane.plugin import PLAIN, ModelOutput
from inferplane.plugins import host
from inferplane.types.batch import Query, make_batch
from inferplane_cpu.kernels.layer_description import native_layer
from inferplane_cpu.kernels.model import causal_lm
from inferplane_cpu.native import instruction_sets, native, use_instruction_set
from tests.unit.support.small import ENDS, LLAMA, PROJECTIONS, V3, WHOLE_MODEL, tiny_llama, tiny_v3

SETS = instruction_sets()
needs_library = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
pytestmark = needs_library

LENGTHS = {"one": (250,), "ragged": (40, 37, 29)}
SCHEDULES = {
    "tokens": lambda sequence, done, total: 1 if done else total - 12,
    "drafts": lambda sequence, done, total: (1, 4, 2)[sequence] if done else total - 12,
}
"""The last twelve tokens singly, or as up to seven rows a step; at nine and more rows the chain gives its turn back."""


def bound_model(tree, weights, tokens, without=(), kv_dtype="auto", invariant=False):
    """The bound model. Its steps of few tokens are one call; without kernels for "causal_lm" all layers are; without
    those for "decoder_stack" (`PARTS`) too, each is. With `invariant` all its native kernels are batch-invariant.
    """
    subject = Subject.of(host(), "cpu", "bfloat16")
    if invariant:
        subject.kernels = [k for k in subject.kernels if k.batch_invariant or k.provider != "native"]
    subject.kernels = [k for k in subject.kernels if k.op not in without]
    bound = stepping.on_device(subject, tree, torch.bfloat16, weights, tokens, kv_dtype)
    labels = {op.name: choice.label for _, op, choice in bound.plan.sites("decode")}
    for op in ("causal_lm", "decoder_stack"):
        assert without or labels[op] == f"native:{op}"
    return bound


STACK, EACH, SMALL = ("causal_lm",), ("causal_lm", "decoder_stack"), ("causal_lm", "decoder_stack", "decoder_layer")
"""What to bind without: then all layers are one call, each layer is, and each layer is made of smaller kernels."""


def count_bodies(view, calls):
    """Have the steps counted that a kernel of several parts leaves to its body."""
    body = view.body

    def count(*args):
        calls.append(args)
        return body(*args)

    view.body = count


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    ("format", "ends"),
    [
        *((format, ends) for format in (PLAIN, "fp8_block") for ends in ("own", "tied")),
        *((format, ends) for format in ("int8_group", "int4_group32") for ends in ("own", "tied", "coded")),
        ("int4_min32", "coded"),
        ("int8_min16", "own"),
        ("int8_row", "coded"),
        ("fp8_block", "head"),
    ],
)
@pytest.mark.parametrize(("lengths", "schedule"), [("one", "tokens"), ("ragged", "tokens"), ("ragged", "drafts")])
def test_one_call_gives_what_its_parts_give_in_turn(name, format, lengths, schedule, ends):
    """With a bfloat16 head of its own, one that the embedding shares, and head or both in the layers' format."""
    coded = {"head": ENDS[1:], "coded": ENDS}.get(ends, ())
    tree = tiny_llama(format=format, names=(*PROJECTIONS, *coded), tie_word_embeddings=ends == "tied")
    weights = stepping.draw_weights(tree, torch.bfloat16)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 97, (n - 1,), generator=draw).tolist() for n in LENGTHS[lengths]]
    found, calls = [], []
    with use_instruction_set(name):
        for without in ((), STACK, EACH):
            bound = bound_model(tree, weights, max(LENGTHS[lengths]), without)
            if not without:
                count_bodies(view_of(bound.steps["decode"]), calls)
            found.append(stepping.run(bound, prompts, SCHEDULES[schedule]))
    for one, layers, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(layers, other)
    assert not calls, "steps that one call did not serve"


def long_rows(of):
    """A model whose weights have rows long enough to be taken in turn (csrc/products/bf16_dot.h: kMinStreamColumns)."""
    if of == "dense":
        tree = tiny_llama(hidden_size=512, intermediate_size=528, num_attention_heads=8, head_dim=64)
        taken = [rows for layer in tree.layers for rows in (layer.attn.o, layer.mlp.down)]
    else:
        tree = tiny_v3(hidden_size=512, q_lora_rank=512, moe_intermediate_size=528, v_head_dim=256)
        taken = [layer.attn.o for layer in tree.layers]
    assert all(rows.weight.shape[1] >= 512 for rows in taken)
    return tree


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("of", ["dense", "experts"])
@pytest.mark.parametrize(
    ("lengths", "counts"),
    [((12,), (1,)), ((12, 12), (1, 1)), ((12, 9, 7), (1, 1, 1)), ((21, 13, 9), (1, 4, 2))],
)
def test_one_row_and_two_are_summed_in_one_order_by_all(name, of, lengths, counts):
    """By a step's call, a layer's, and the products. On AMX it is another one than that of batch-invariant kernels;
    sequences end one by one, so that every run comes to one row.
    """
    tree = long_rows(of)
    weights = stepping.draw_weights(tree, torch.bfloat16, steady_routes=True)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 97, (n,), generator=draw).tolist() for n in lengths]
    ways = {}, {"without": EACH}, {"without": SMALL}, {"invariant": True}
    with use_instruction_set(name):
        step, layer, parts, fixed = (
            stepping.run(bound_model(tree, weights, 64, **way), prompts, lambda i, *_: counts[i]) for way in ways
        )
    assert [len(rows) for rows in step] == list(lengths)
    assert all(map(torch.equal, step, layer)) and all(map(torch.equal, step, parts))
    assert all(map(torch.equal, step, fixed)) is (name != "amx")


@pytest.mark.parametrize("name", SETS)
def test_a_step_in_one_call_gives_the_logits_that_are_asked_for(name):
    """Of several rows a sequence the last one or two, or none; and hidden states of all rows."""
    tree = tiny_llama(format="int4_group32", names=(*PROJECTIONS, *ENDS))
    bound, calls = bound_model(tree, stepping.draw_weights(tree, torch.bfloat16), 40), []
    view = view_of(bound.steps["decode"])
    body = view.body
    count_bodies(view, calls)
    with use_instruction_set(name):
        for wanted, rows in (((1, 2), [2, 5, 6]), ((0, 1), [6]), ((0, 0), [])):
            queries = [Query([3, 4, 5], 0, [0, 1], wanted[0]), Query([6, 7, 8, 9], 0, [2, 3], wanted[1])]
            batch = make_batch(queries, block_tokens=16, device="cpu")
            assert batch.logit_rows.tolist() == rows
            one = bound.steps["decode"](batch, bound.cache)
            assert not calls
            parts = body(batch, bound.cache)
            assert one[0].shape == (len(rows), 97) and one[0].isfinite().all() and one[1].shape[0] == 7
            assert all(torch.equal(a, b) for a, b in zip(one, parts, strict=True))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", ["as they come", "equals", "NaN", "all alike"])
def test_a_step_in_one_call_finds_the_largest_logits(name, kind):
    """Those that the op `sample` finds in its logits."""
    tree = tiny_llama(vocab_size=5001)  # several pieces for every thread
    weights = stepping.draw_weights(tree, torch.bfloat16)
    head = weights[id(tree.head.weight)]
    if kind == "equals":
        head[2500:5000] = head[:2500]
    elif kind == "NaN":
        head[[4990, 33, 4000]] = torch.nan
    elif kind == "all alike":
        head.zero_()
    bound = bound_model(tree, weights, 40)
    step = bound.steps["decode"]
    greedy = torch.zeros(6), None, None, None, None
    with use_instruction_set(name):
        output = step(replace(step_of(2), logit_rows=None), bound.cache)
        assert isinstance(output, ModelOutput)
        logits, found = output[0], output.argmax
        assert torch.equal(found, view_of(step).sample(logits, *greedy))
        want = torch.full((6,), 33) if kind == "NaN" else (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        assert torch.equal(found, want)
        assert len(set(want.tolist())) > 1 or kind in ("NaN", "all alike")


def step_of(rows):
    return make_batch([Query([3, 4, 5][:rows], 0, [i], 1) for i in range(3)], block_tokens=16, device="cpu")


@pytest.mark.parametrize(("part", "other"), [("norm", "torch"), ("head", "torch"), ("embed", "reference")])
def test_a_step_in_one_call_is_only_for_what_it_knows(part, other):
    """Parts bound to another kernel go one by one, and the plan says why; so do more rows than it takes."""
    subject, tree = Subject.of(host(), "cpu", "bfloat16"), tiny_llama()
    settings = PlanSettings("cpu", torch.bfloat16, features=subject.features)
    offers = lambda request: subject.layouts(request, torch.bfloat16)  # noqa: E731
    plan = bind(tree, subject.kernels, settings, offers, options=Options({part: other}))
    choice = plan.choices["decode"]
    assert choice.label == "decomposition" and choice.children["layers"].label == "native:decoder_stack"
    (reason,) = [r.reason for r in choice.rejected if r.kernel == "native:causal_lm"]
    assert reason == f"{part} is bound to {choice.children[part].label}, which it cannot run"
    bound, calls = bound_model(tree, stepping.draw_weights(tree, torch.bfloat16), 40), []
    count_bodies(view_of(bound.steps["decode"]), calls)
    for rows, bodies in ((2, 0), (3, 1)):
        assert bound.steps["decode"](step_of(rows), bound.cache)[0].shape == (3, 97)
        assert len(calls) == bodies


def test_what_is_out_of_range_is_told_by_the_parts():
    tree = tiny_llama()
    bound, calls = bound_model(tree, stepping.draw_weights(tree, torch.bfloat16), 40), []
    count_bodies(view_of(bound.steps["decode"]), calls)
    step, good = bound.steps["decode"], step_of(2)
    for changes in ({"ids": good.ids.index_fill(0, torch.tensor([3]), 97)}, {"ids": good.ids - 5}):
        with pytest.raises(IndexError, match="out of range"):
            step(replace(good, **changes), bound.cache)
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        step(replace(good, logit_rows=good.logit_rows + 4), bound.cache)
    for times in (3, 2000):  # of three rows
        often = replace(good, logit_rows=good.logit_rows.repeat(times))
        calls.clear()
        assert step(often, bound.cache)[0].shape == (3 * times, 97) and len(calls) == 1
    assert step(good, bound.cache)[0].isfinite().all()


@pytest.mark.parametrize("wrong", ["all rows", "hidden states"])
def test_conformance_sees_a_wrong_step(wrong):
    subject = Subject.of(host(), "cpu", "bfloat16")

    def broken(view, batch, cache):
        if wrong == "all rows":
            return causal_lm(view, replace(batch, logit_rows=None), cache)
        logits, hidden = causal_lm(view, batch, cache)
        return logits, hidden * 1.5

    subject.kernels = [replace(k, target=broken) if k.op == "causal_lm" else k for k in subject.kernels]
    case = test_models.ModelCase(TINY["llama"], "bfloat16", "", "llama")
    with pytest.raises((AssertionError, pytest.fail.Exception), match=r"instead of|are wrong by"):
        test_models.test_results_of_a_step(case, subject, lambda **figures: None)


MANY_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}
LATENTS = partial(tiny_v3, num_hidden_layers=2)
LATENTS_IN_4_BITS = partial(LATENTS, format="int4_group32")


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    ("make", "kv_dtype"),
    [
        (partial(tiny_llama, positions=640, **MANY_HEADS), "auto"),
        (partial(tiny_llama, positions=640, **MANY_HEADS), "int8"),
        (partial(tiny_llama, positions=640, format="int4_group32"), "auto"),
        (LATENTS, "auto"),
        (LATENTS_IN_4_BITS, "auto"),
    ],
    ids=["many_heads", "int8_cache", "int4", "latents", "latents_int4"],
)
def test_any_number_of_threads_gives_the_same_bits(make, kv_dtype, name):
    """Long sequences, short ones, and one of each: alone, in a share for each thread, and 40 threads in 32 shares."""
    tree = make()
    weights = stepping.draw_weights(tree, torch.bfloat16)
    draw = torch.Generator().manual_seed(3)
    before, most = torch.get_num_threads(), 200 if make in (LATENTS, LATENTS_IN_4_BITS) else 600
    try:
        for lengths in ((most,), (40, 37, 29), (most, 14)):
            prompts = [torch.randint(0, 97, (n,), generator=draw).tolist() for n in lengths]
            found = []
            for threads in (1, 2, 3, 40):
                torch.set_num_threads(threads)
                with use_instruction_set(name):
                    bound = bound_model(tree, weights, most + 1, kv_dtype=kv_dtype)
                    found.append(stepping.run(bound, prompts, SCHEDULES["tokens"]))
            assert all(rows.isfinite().all() for rows in found[0])
            for other in found[1:]:
                assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    finally:
        torch.set_num_threads(before)


def affinities():
    """The processors that each thread of this process may use."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            found[task] = os.sched_getaffinity(int(task))
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="not run: threads are listed on Linux only")
def test_a_busy_neighbour_changes_speed_alone():
    """Threads that lose their core, or are put on one together, give the same bits, and may go anywhere afterwards."""
    tree, before = tiny_llama(positions=640, **MANY_HEADS), torch.get_num_threads()
    weights = stepping.draw_weights(tree, torch.bfloat16)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 97, (600,), generator=draw).tolist() for _ in range(2)]
    count = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\nwhile True: pass"
    try:
        found = []
        for threads, crowded in ((5, False), (2, True), (5, True)):
            torch.set_num_threads(threads)
            with contextlib.ExitStack() as exits:
                if crowded:
                    neighbour = exits.enter_context(subprocess.Popen([sys.executable, "-c", count]))
                    exits.callback(neighbour.kill)
                bound = bound_model(tree, weights, 601)
                found.append((stepping.run(bound, prompts, SCHEDULES["tokens"]), affinities()))
        (rows, may_be), *others = found
        for again, may_be_now in others:
            assert all(torch.equal(a, b) for a, b in zip(rows, again, strict=True))
            same = may_be.keys() & may_be_now.keys()
            assert len(same) > 1 and all(may_be[t] == may_be_now[t] for t in same)
    finally:
        torch.set_num_threads(before)


def test_layers_of_two_windows_go_in_turn():
    """One plan of attention serves one window; a chain over two gives its turn back, and the results stay."""
    tree = tiny_llama()
    weights = stepping.draw_weights(tree, torch.bfloat16)
    bound, single = bound_model(tree, weights, 40), bound_model(tree, weights, 40, EACH)
    layers = [view_of(bound.steps["decode"]).layers.layers]
    layers.append([view_of(layer) for layer in view_of(view_of(single.steps["decode"]).layers).layers])
    prompt = [list(range(2, 38))]
    whole = stepping.run(bound, prompt, SCHEDULES["tokens"])[0]
    for first, second, _ in layers:
        native_layer(first, False).window, native_layer(second, False).window = 0, 5
    windowed = stepping.run(bound, prompt, SCHEDULES["tokens"])[0]
    assert not torch.equal(whole, windowed)
    assert torch.equal(windowed, stepping.run(single, prompt, SCHEDULES["tokens"])[0])


def latents_and_experts(format, kv_b=None):
    """DeepSeek-V3 in small: one format everywhere but in the router, and kv_b perhaps in another."""

    def of(name):
        projection = name.endswith(("_proj.weight", "_mqa.weight"))
        return (kv_b or format if "kv_b" in name else format) if projection else PLAIN

    return deepseek_v3(Build(Config(V3), WHOLE_MODEL, of, positions=256))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    ("format", "kv_b"),
    [
        *((format, None) for format in (PLAIN, "int8_group", "int4_group32", "fp8_block")),
        ("int4_group32", PLAIN),
        ("int8_group", "int4_row"),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_latents_and_experts_in_one_call(name, format, kv_b, schedule):
    """The chain gives what its layers give in turn, and these what smaller kernels give."""
    tree = latents_and_experts(format, kv_b)
    weights = stepping.draw_weights(tree, torch.bfloat16, steady_routes=True)
    draw = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 97, (n - 1,), generator=draw).tolist() for n in LENGTHS["ragged"]]
    with use_instruction_set(name):
        chained, single, parts = (
            stepping.run(bound_model(tree, weights, 40, without), prompts, SCHEDULES[schedule])
            for without in ((), EACH, SMALL)
        )
    for one, other, small in zip(chained, single, parts, strict=True):
        assert torch.equal(one, other)
        assert (one - small).abs().max() <= CausalLM.tolerance[torch.bfloat16] * small.abs().max()


Q4_K_M = {"q_proj": "int4_min32", "k_proj": "int4_min32", "v_proj": "int8_group16", "down_proj": "int8_group16"}
"""Formats of what has another one than `int4_min32`, as llama.cpp stores it under this name."""


@pytest.mark.parametrize("name", SETS)
def test_parts_and_layers_of_several_formats(name):
    """Fused parts take the format that holds both; a step is one call that gives what smaller kernels give."""

    def of(part):
        module, ends = part.removesuffix(".weight").rpartition(".")[2], "int8_group16" if part.endswith(ENDS) else PLAIN
        return Q4_K_M.get(module, "int4_min32" if module.endswith("_proj") else ends)

    tree = llama(Build(Config({**LLAMA, "tie_word_embeddings": True}), WHOLE_MODEL, of, positions=256))
    assert tree.layers[0].attn.qkv.weight.format == "int8_min16"
    assert tree.embed.weight.format == "int8_group16" and tree.head.weight is tree.embed.weight
    weights = stepping.draw_weights(tree, torch.bfloat16)
    draw = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 97, (n - 1,), generator=draw).tolist() for n in LENGTHS["ragged"]]
    with use_instruction_set(name):
        chained, parts = (
            stepping.run(bound_model(tree, weights, 40, without), prompts, SCHEDULES["tokens"])
            for without in ((), SMALL)
        )
    for one, small in zip(chained, parts, strict=True):
        assert (one - small).abs().max() <= CausalLM.tolerance[torch.bfloat16] * small.abs().max()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", sorted(TINY))
def test_every_family_decodes_in_one_call(family, kv_dtype):
    subject = Subject.of(host(), "cpu", "bfloat16")
    tree = model(TINY[family])
    plan = stepping.plan_for(subject, tree, torch.bfloat16, kv_dtype)
    bound = [choice.label for site, op, choice in plan.sites("decode") if op.name == "decoder_layer"]
    assert set(bound) == {"decomposition" if family == "glm_moe_dsa" else "native:decoder_layer"}  # an indexer: parts
