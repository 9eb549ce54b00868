"""Steps captured with verification and drafts in one graph: the same tokens and the same cache as captured separately
and as eager steps, on a device that captures by remembering the call.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.engine.runner.capture_check import CaptureChecker
from inferplane.engine.speculate.captured.captured_steps import CapturedSteps
from inferplane.types import Backend
from inferplane_cpu.backend import CpuBackend
from tests.e2e.drafters import eagle_head, with_mtp
from tests.e2e.tiny_models import deepseek_config, llama_config, prompts, random_model
from tests.unit.engine.runner.test_capture import Record

GREEDY = {"temperature": 0, "ignore_eos": True}
WAYS = ("eager", "apart", "together")


@pytest.fixture
def opened(monkeypatch):
    """Opens a model on a host whose kernels are all safe to capture, in one of three ways."""
    safe = [replace(kernel, capture_safe=True) for kernel in CpuBackend().kernels()]
    monkeypatch.setattr(CpuBackend, "kernels", lambda self: safe)
    models = []

    def make(way, model, speculative, **options):
        record = Backend.capture if way == "eager" else lambda self, step, bucket: Record(step, bucket)
        monkeypatch.setattr(CpuBackend, "capture", record)
        llm = LLM(model, device="cpu", dtype="float32", speculative_config=speculative, **options)
        models.append(llm)
        if way == "apart":
            llm.engine.speculator.captured_steps.disabled_reason = "apart"
        return llm

    yield make
    for llm in models:
        llm.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Latent attention and an MTP module; grouped queries and an EAGLE head. Their drafts are hardly ever right."""
    at = tmp_path_factory.mktemp("models")
    random_model(deepseek_config(num_hidden_layers=2), seed=3).save_pretrained(at / "mtp")
    with_mtp(at / "mtp")
    random_model(llama_config(), seed=3).save_pretrained(at / "eagle")
    eagle_head(at / "head", width=64, vocab=160)
    return at


def spec(method, head, drafts=3, **more):
    found = {"method": method, "num_speculative_tokens": drafts, "only_if_faster": False, **more}
    return found if method == "mtp" else {**found, "model": head}


def told(llm, results):
    """What must not depend on how steps are run."""
    names = (
        "steps_total", "forward_rows_total", "num_preemptions_total", "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total", "prefix_cache_hits_total", "kv_blocks_free", "kv_blocks_cached",
    )  # fmt: skip
    stats = llm.engine.stats()
    return [(r.token_ids, r.text, r.finish_reason) for r in results], {n: stats.get(n, 0) for n in names}


def drafting_entries(llm):
    """Entries of the drafting layer in blocks that can be found again, by what they hold."""
    kv, n = llm.runner.cache.layers[-1], llm.runner.cache.block_tokens
    blocks = {h: b for b, h in llm.engine.pools.first._hash_of.items()}
    return {h: [e[b * n : (b + 1) * n].clone() for e in kv.entries] for h, b in blocks.items()}


@pytest.mark.parametrize("strategy", ["rejection", "target_match"])
@pytest.mark.parametrize("method", ["mtp", "eagle"])
def test_the_same_tokens_as_apart_and_eager(opened, method, strategy, monkeypatch):
    """Greedy and sampled side by side, of which some end early, by a stop inside of accepted drafts among them.

    No capture is dropped: a wrong one shows in the tokens. In the tests below they are compared with their steps, too.
    """
    monkeypatch.setattr(CaptureChecker, "check", lambda self, *arguments, **options: "")
    params = [
        SamplingParams(max_tokens=26, temperature=0.0),
        SamplingParams(max_tokens=14, temperature=0.8, seed=1),
        SamplingParams(max_tokens=30, temperature=0.0, stop=["):", "return"]),
        SamplingParams(max_tokens=22, temperature=0.9, seed=2, top_k=5),
        SamplingParams(max_tokens=2, temperature=0.0),
        SamplingParams(max_tokens=20, temperature=0.7, seed=3, top_p=0.8, min_p=0.05),
    ]
    texts = ["def f(", "class Stack:", "import ", "for x in", "a = ", "while True:"]
    found, accepted = {}, 0
    for way in WAYS:
        llm = opened(
            way, "demo", spec(method, "demo-eagle", verify_strategy=strategy), max_num_seqs=4, max_model_len=96
        )
        found[way] = told(llm, llm.generate(texts, params))
        accepted = found[way][1]["spec_decode_num_accepted_tokens_total"]
        captured = llm.engine.speculator.captured_steps
        assert (captured.replayed > 8) == (way == "together"), (captured.disabled_reason, captured.fallbacks)
    assert found["together"] == found["apart"] == found["eager"] and accepted > 5
    assert captured.disabled_reason == "" and set(captured.fallbacks) <= {
        "a prompt is read",
        "a sequence is shorter than what is padded",
    }
    assert len({form.kinds for bucket in captured.buckets.values() for form in bucket.graphs}) > 1


@pytest.mark.parametrize("policy", ["normal", "accept_all"])
@pytest.mark.parametrize("method", ["mtp", "eagle"])
def test_the_same_cache_behind_it(opened, folders, method, policy):
    """Entries of published blocks, which a later request reads: whoever wrote them, and whatever was refused."""
    given = spec(method, folders / "head", accept_policy=policy)
    first = prompts(160, (37, 20, 5))
    found, entries = {}, {}
    for way in WAYS:
        llm = opened(way, folders / method, given, max_num_seqs=3, max_model_len=160)
        results = llm.generate(first, [SamplingParams(max_tokens=n, **GREEDY) for n in (40, 61, 33)])
        longer = [[*p, *r.token_ids[:-2]] for p, r in zip(first, results)]
        results += llm.generate(longer, SamplingParams(max_tokens=18, **GREEDY))
        found[way], entries[way] = told(llm, results), drafting_entries(llm)
    assert found["together"] == found["apart"] == found["eager"]
    assert found["eager"][1]["prefix_cache_hits_total"] > 0 and llm.engine.speculator.captured_steps.replayed > 8
    mine, theirs = entries["together"], entries["eager"]
    assert mine.keys() == theirs.keys() and len(mine) > 3
    assert all(torch.allclose(a, b, atol=1e-5) for h in mine for a, b in zip(mine[h], theirs[h]))


def test_little_room(opened, folders):
    """Sequences make room for each other and are computed again; where blocks lack for all drafts, steps run apart."""
    found = {}
    for way in WAYS:
        llm = opened(way, folders / "mtp", spec("mtp", None, 7), max_num_seqs=4, max_model_len=160)
        whole = llm.runner.block_bytes() * llm.runner.cache.blocks
        tight = whole * 11 // llm.runner.cache.blocks
        llm.close()
        llm = opened(
            way, folders / "mtp", spec("mtp", None, 7), max_num_seqs=4, max_model_len=160, kv_cache_bytes=tight
        )
        assert llm.runner.cache.blocks == 11
        params = [SamplingParams(max_tokens=n, temperature=t, seed=n, ignore_eos=True) for n, t in ((60, 0), (70, 0.9))]
        found[way] = told(llm, llm.generate(prompts(160, (30, 31, 32, 33)), params * 2))
        captured = llm.engine.speculator.captured_steps
    assert found["together"] == found["apart"] == found["eager"] and found["eager"][1]["num_preemptions_total"] > 0
    assert captured.replayed > 8 and captured.fallbacks["too few blocks are free for all drafts"] > 0
    assert llm.engine.pools.used == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_keeps_its_blocks_between_its_chunks(opened, folders, way):
    """It took them all as it joined, so that it need not push anybody out, or out itself, when it is half read."""
    llm = opened(way, folders / "mtp", spec("mtp", None), max_num_seqs=2, max_model_len=160, max_num_batched_tokens=24)
    (asked,) = prompts(160, (120,))
    request, held = llm.engine.add(asked, SamplingParams(max_tokens=4, **GREEDY), frozenset()), []
    while not request.generated:
        llm.engine.step()
        held.append(len(request.blocks))
    need = -(-120 // llm.runner.cache.block_tokens)
    assert len(held) == 5 and min(held) >= need > -(-24 // llm.runner.cache.block_tokens)


@pytest.mark.parametrize("policy", ["normal", "accept_all"])
def test_drafts_are_written_to_blocks_of_their_own_sequence(opened, folders, policy):
    """Whatever stands: also the last of the most drafts has a place that nobody else has."""
    given = spec("mtp", None, 7, adaptive=False, accept_policy=policy)
    llm = opened("together", folders / "mtp", given, max_num_seqs=3, max_model_len=160)
    captured, n, own, seen = llm.engine.speculator.captured_steps, llm.runner.cache.block_tokens, [], []
    fill, layer = captured._fill, captured.function.layer

    def filled(bucket, size, chosen, next_rows):
        own[:] = [list(s.request.blocks) for s in chosen]
        return fill(bucket, size, chosen, next_rows)

    def written(batch, hidden):
        for row, (slot, position) in enumerate(zip(batch.slots.tolist(), batch.positions.tolist())):
            if slot >= 0:
                seen.append(position)
                assert own[row // batch.max_query_tokens][position // n] == slot // n
        return layer(batch, hidden)

    captured._difference = lambda *args: ""  # trials write to blocks of nobody
    captured._fill, captured.function = filled, replace(captured.function, layer=written)
    ends = [SamplingParams(max_tokens=tokens, **GREEDY) for tokens in (38, 34, 34)]  # with the last token of a block
    asked = [llm.engine.add(p, end, frozenset()) for p, end in zip(prompts(160, (11, 15, 31)), ends)]
    while llm.engine.busy:
        llm.engine.step()
        assert all(len(r.blocks) <= -(-(r.computed + 7) // n) for r in asked), "what was too much comes back"
    assert all(r.finish_reason == "length" for r in asked), [r.error for r in asked]
    assert captured.replayed > 3 and captured.disabled_reason == "" and seen


def test_a_sequence_shorter_than_the_padding_runs_apart(opened, folders):
    llm = opened("together", folders / "mtp", spec("mtp", None, 7), max_num_seqs=2, max_model_len=160)
    llm.generate(prompts(160, (1,)), SamplingParams(max_tokens=30, **GREEDY))
    captured = llm.engine.speculator.captured_steps
    assert captured.fallbacks["a sequence is shorter than what is padded"] > 0 and captured.replayed > 4


@pytest.mark.parametrize("way", WAYS)
def test_closing_lets_go_of_the_drafting_layer(opened, folders, way):
    """Its cache, and what the graphs read."""
    llm = opened(way, folders / "mtp", spec("mtp", None), max_num_seqs=2, max_model_len=160)
    llm.generate(prompts(160, (12, 15)), SamplingParams(max_tokens=9, **GREEDY))
    refs = [weakref.ref(llm.runner.cache.layers[-1].entries[0])]
    refs += [weakref.ref(bucket.numbers) for bucket in llm.engine.speculator.captured_steps.buckets.values()]
    assert (len(refs) > 1) == (way == "together"), "nothing is held where nothing is captured"
    llm.close()
    gc.collect()
    assert [r() for r in refs] == [None] * len(refs)


ASKED = {
    "log-probabilities": {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.3},
    "a logit bias": {"logit_bias": {7: 1.5}},
    "min_tokens": {"min_tokens": 18, "ignore_eos": False, "stop_token_ids": (9,)},
}


@pytest.mark.parametrize("reason", ASKED)
def test_what_asks_for_the_host_runs_apart(opened, folders, reason):
    """And alone: when it has ended, the others go on together."""
    params = [SamplingParams(max_tokens=60, **GREEDY), SamplingParams(max_tokens=20, **{**GREEDY, **ASKED[reason]})]
    found = {}
    for way in WAYS:
        llm = opened(way, folders / "mtp", spec("mtp", None), max_num_seqs=2, max_model_len=160)
        results = llm.generate(prompts(160, (12, 15)), params)
        found[way] = told(llm, results), [r.logprobs for r in results]
    captured = llm.engine.speculator.captured_steps
    assert found["together"][0] == found["eager"][0]
    assert found["together"] == found["apart"], "log-probabilities too, to the last bit"
    assert captured.fallbacks[reason] > 8 and captured.replayed > 8


def test_a_constraint_runs_apart(opened):
    llm = opened("together", "demo", spec("mtp", None), max_num_seqs=2, max_model_len=96)
    llm.generate(["def f("], SamplingParams(max_tokens=12, temperature=0, regex="[a-z]+"))
    captured = llm.engine.speculator.captured_steps
    assert captured.fallbacks["a constraint"] > 0 and captured.replayed == 0


def test_a_failed_capture_costs_the_graph_and_nothing_else(opened, folders, monkeypatch):
    want = opened("eager", folders / "mtp", spec("mtp", None), max_num_seqs=2, max_model_len=160)
    params = SamplingParams(max_tokens=20, **GREEDY)
    tokens = [r.token_ids for r in want.generate(prompts(160, (12, 15)), params)]

    def fill(self, bucket, size, chosen, next_rows):
        kinds = plain(self, bucket, size, chosen, next_rows)
        monkeypatch.setattr(CpuBackend, "capture", lambda self, step, bucket: torch.zeros(2)[5])
        return kinds

    llm = opened("together", folders / "mtp", spec("mtp", None), max_num_seqs=2, max_model_len=160)
    plain = CapturedSteps._fill
    monkeypatch.setattr(CapturedSteps, "_fill", fill)
    assert [r.token_ids for r in llm.generate(prompts(160, (12, 15)), params)] == tokens
    assert "capturing 2 sequences failed: IndexError" in llm.engine.speculator.captured_steps.disabled_reason


def test_a_broken_step_ends_the_request_it_is_in(opened, folders):
    """NaN in one sequence: found in the table, and the others go on as if it had never run."""
    llm = opened("together", folders / "mtp", spec("mtp", None), max_num_seqs=3, max_model_len=160)
    asked = prompts(160, (12, 15, 9))
    params = SamplingParams(max_tokens=30, **GREEDY)
    want = [r.token_ids for r in llm.generate(asked, params)]
    captured = llm.engine.speculator.captured_steps
    plain, poisoned = captured._fill, []

    def fill(bucket, size, chosen, next_rows):
        for s in chosen:
            if s.request.prompt == asked[1] and len(s.request.generated) > 8 and not poisoned:
                poisoned.append(s.request)
                block = s.request.blocks[0] * llm.runner.cache.block_tokens
                for entries in llm.runner.cache.layers[0].entries:
                    entries[block] = torch.nan
        return plain(bucket, size, chosen, next_rows)

    captured._fill = fill
    llm.engine.pools.clear()
    got = [llm.engine.add(p, params, frozenset()) for p in asked]
    while llm.engine.busy:
        llm.engine.step()
    assert poisoned and [r.finish_reason for r in got] == ["length", "error", "length"]
    assert "NaN" in got[1].error and [got[0].generated, got[2].generated] == [want[0], want[2]]


def test_explain_tells(opened, folders):
    """In the same graph, or why not."""
    llm = opened("together", folders / "mtp", spec("mtp", None), max_num_seqs=2, max_model_len=160)
    assert llm.explain()["decode_steps"]["drafting_layer"] == ""
    assert "drafts are captured in the same graph" in llm.explain_text()
    llm.engine.speculator.captured_steps.disabled_reason = "a reason"
    assert llm.explain()["decode_steps"]["drafting_layer"] == "a reason"
    assert "drafts are captured separately: a reason" in llm.explain_text()
    llm = opened("eager", folders / "mtp", None, max_num_seqs=2, max_model_len=160)
    assert "drafting_layer" not in llm.explain()["decode_steps"]
