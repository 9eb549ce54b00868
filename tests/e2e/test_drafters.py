"""Drafting layers and draft models: their formula, steps, prefix hits, loading, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import MistralConfig

from inferplane import LLM, SamplingParams
from inferplane.binding import view_of
from inferplane.engine.request import seeds as seed_math
from inferplane.engine.sampling import rng
from inferplane.engine.sampling.batch_rows import BatchRow
from inferplane.engine.speculate import network, verify
from inferplane.engine.speculate.control import DraftControl
from inferplane.errors import CheckpointError, UnsupportedModelError, UsageError
from inferplane.kvcache import paged_layout
from inferplane.plugins import host
from inferplane.types.batch import Query, make_batch
from tests.e2e.drafters import eagle_head, noisy_copy, with_mtp
from tests.e2e.tiny_models import SMALL, deepseek_config, llama_config, prompts, random_model
from tests.unit.support.chi_square import chi_square_p

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model with latent attention and an MTP module, a dense one, and drafters for both."""
    at = tmp_path_factory.mktemp("models")
    random_model(deepseek_config(num_hidden_layers=2), seed=3).save_pretrained(at / "mla_moe")
    with_mtp(at / "mla_moe")
    random_model(llama_config(), seed=3).save_pretrained(at / "gqa")
    for name in ("mla_moe", "gqa"):
        eagle_head(at / f"{name}-eagle", width=64, vocab=160)
        noisy_copy(at / name, at / f"{name}-draft_model")
    return at


def spec(folders, method, model="mla_moe", drafts=3, **more):
    found = {"method": method, "num_speculative_tokens": drafts, "only_if_faster": False, **more}
    if method in ("eagle", "draft_model"):
        found["model"] = folders / f"{model}-{method}"
    return found


# ------------------------------------------------------------------ EAGLE's formula, arXiv 2401.15077


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotate(x):
    """Pairs (i, i + half) of `[heads, tokens, dim]` turned by position times frequency."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1]).double()[:, None] * 1e4 ** -(torch.arange(half).double() / half)
    a, b = x.double().split(half, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).float()


def oracle(t, embed, head, hidden, ids):
    """Logits and next hidden states for hidden states h_i and tokens t_{i+1}."""
    x = torch.cat((embed[torch.tensor(ids)], hidden), -1) @ t["fc.weight"].T + t.get("fc.bias", 0)
    q, k, v = ((x @ t[f"layers.0.self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, 16)).transpose(0, 1) for p in "qkv")
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = rotate(q) @ rotate(k).mT / math.sqrt(16)
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
    x = x + out.transpose(0, 1).flatten(1) @ t["layers.0.self_attn.o_proj.weight"].T
    y = norm(x, t["layers.0.post_attention_layernorm.weight"])
    inner = F.silu(y @ t["layers.0.mlp.gate_proj.weight"].T) * (y @ t["layers.0.mlp.up_proj.weight"].T)
    x = x + inner @ t["layers.0.mlp.down_proj.weight"].T
    return x @ head.T, x


@pytest.mark.parametrize("bias", [False, True])
def test_eagle_against_the_formula(bias, folders, tmp_path):
    tensors = eagle_head(tmp_path, width=64, vocab=160, bias=bias)
    with LLM(
        folders / "gqa",
        device="cpu",
        dtype="float32",
        speculative_config={"method": "eagle", "model": tmp_path},
    ) as llm:
        model = random_model(llama_config(), seed=3)
        embed, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
        cache = llm.runner.cache
        ids = prompts(160, (45,))[0]
        blocks = list(range(7, 10))
        whole = make_batch([Query(ids, 0, blocks)], block_tokens=cache.block_tokens, device="cpu")
        _, hidden = llm.runner.run(whole)
        ids, hidden = ids[1:], hidden[:-1]
        got = []
        for start, stop in ((0, 12), (12, 13), (13, len(ids))):  # prefill, decode, chunk
            batch = make_batch([Query(ids[start:stop], start, blocks)], block_tokens=cache.block_tokens, device="cpu")
            layer = view_of(llm.runner.steps[batch.kind]).mtp[0]
            with torch.inference_mode():
                got.append(layer(hidden[start:stop], batch, cache.layers[-1]))
        for i, want in enumerate(oracle(tensors, embed, head, hidden, ids)):
            rows = torch.cat([g[i] for g in got])
            assert (rows - want).abs().max() <= 1e-5 * want.abs().max()
        (drafter,) = llm.runner.drafters
        assert drafter.loaded.ignored == ["embed_tokens.weight"]
        assert not drafter.loaded.unused and not llm.runner.loaded.unused


# ------------------------------------------------------------------ steps


@pytest.mark.parametrize("model", ["mla_moe", "gqa"])
def test_a_model_that_drafts_for_itself_is_always_right(model, folders):
    """Every draft stands, so its cache holds what it should: after some, none and all of a step's drafts."""
    for drafts in (1, 3, 7):
        config = {
            "method": "draft",
            "model": folders / model,
            "num_speculative_tokens": drafts,
            "only_if_faster": False,
        }
        with LLM(folders / model, device="cpu", dtype="float32", speculative_config=config) as llm:
            got = llm.generate(prompts(160, (20, 5, 33)), SamplingParams(max_tokens=41, **GREEDY))
            stats = llm.engine.stats()
            assert all(len(r.token_ids) == 41 for r in got)
            drafted, accepted = (stats[f"spec_decode_num_{x}_tokens_total"] for x in ("draft", "accepted"))
            assert drafted == accepted > 0
            assert stats["steps_total"] == 1 + math.ceil(40 / (1 + drafts))
            rows = stats["generation_tokens_total"] - 3 - drafted  # one a sequence and step, beside its drafts
            assert stats["forward_rows_total"] == 58 + rows + drafted


@pytest.mark.parametrize("blocks", [9, 10, 11])
def test_it_stays_right_in_little_room(blocks, folders):
    """Preempted, trimmed, found again: what is in its cache is what belongs there."""
    config = {
        "method": "draft",
        "model": folders / "gqa",
        "num_speculative_tokens": 7,
        "adaptive": False,
    }
    options = {"device": "cpu", "dtype": "float32", "speculative_config": config}
    with LLM(folders / "gqa", max_model_len=64, **options) as llm:
        a_block = llm.runner.block_bytes() + llm.runner.draft.block_bytes()
    with LLM(folders / "gqa", kv_cache_bytes=blocks * a_block, max_num_batched_tokens=24, **options) as llm:
        each = [p[: 9 + 3 * i] for i, p in enumerate(prompts(160, (40,) * 5))]
        llm.generate(each, SamplingParams(max_tokens=44, **GREEDY))
        stats = llm.engine.stats()
        assert stats["num_preemptions_total"] > 0
        drafted, accepted = (stats[f"spec_decode_num_{x}_tokens_total"] for x in ("draft", "accepted"))
        assert drafted == accepted > 0


@pytest.mark.parametrize("method", ["ngram", "draft_model", "mtp", "eagle"])
def test_rows_are_one_and_the_drafts_of_each(method, folders):
    """Bar i, counted where the model runs: never the longest draft times the batch."""
    with LLM(folders / "mla_moe", device="cpu", dtype="float32", speculative_config=spec(folders, method)) as llm:
        engine, told = llm.engine, []
        schedule, run = engine.scheduler.schedule, engine.runner.run
        engine.scheduler.schedule = lambda: told.append([]) or [told[-1].append(s) or s for s in schedule()]
        counted = []
        engine.runner.run = lambda batch: counted.append(batch.tokens) or run(batch)
        each = [p * 2 for p in prompts(160, (9, 4, 20))]
        llm.generate(each, [SamplingParams(max_tokens=n, **GREEDY) for n in (30, 12, 21)])
        assert counted == [sum(s.count + len(s.drafts) for s in step) for step in told if step]
        uneven = [step for step in told if len({len(s.drafts) for s in step}) > 1]
        assert uneven, "some step has drafts of different lengths"
        assert all(s.count == 1 for step in told[1:] for s in step)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "mtp", "eagle"])
def test_rejection_keeps_the_distribution_of_what_each_method_drafts(method, temperature, folders):
    """Bar g: 20,000 draws with the drafts that the method makes at one place, and the model's own logits there."""
    draws = 20_000
    params = SamplingParams(max_tokens=9, temperature=temperature, seed=5, ignore_eos=True)
    with LLM(
        folders / "mla_moe", device="cpu", dtype="float32", speculative_config=spec(folders, method, drafts=2)
    ) as llm:
        prompt = [*prompts(160, (12,))[0], *range(160)]  # every token was said before, so n-grams find something
        request = llm.add(prompt, params)
        llm.engine.step()
        drafts = list(request.drafts)
        assert len(drafts) == 2
        logits = llm.logits([[*prompt, *request.generated, *drafts]])[0][-3:]
        sampler = llm.engine.sampler
        rows = [
            BatchRow(params, seed_math.child_seed(7, s), i + 1, None, drafts[:i])
            for s in range(draws)
            for i in range(3)
        ]
        step, every = sampler.prepare(rows), logits.repeat(draws, 1)
        with torch.inference_mode():
            drawn, p = sampler.sample(every, step), sampler.probabilities(every, step)
            uniforms = torch.stack([rng.uniform(step.seeds, step.positions, stream) for stream in (1, 2)], 1)
            got = verify(drawn, [drafts] * draws, llm.engine.speculator.config, p, uniforms)
        stood = got.counts > 1
        assert abs(float(stood.float().mean()) - float(p[0, drafts[0]])) < 4 * math.sqrt(0.25 / draws)
        assert chi_square_p(torch.bincount(got.tokens[:, 0], minlength=160), p[0]) > 1e-3
        if stood.sum() > 300:
            assert chi_square_p(torch.bincount(got.tokens[stood, 1], minlength=160), p[1]) > 1e-3


# ------------------------------------------------------------------ prefix hits


def drafted_for(llm, prompt, n=14):
    """What is drafted after each step of a request that runs alone, and the drafter's cache over its tokens."""
    proposer, told, kept = llm.engine.speculator.proposer, [], []
    inner = proposer.propose

    def propose(ran, wants, hidden):
        drafts = inner(ran, wants, hidden)
        request = ran[0].request if ran else None
        if request is not None and request.remaining == 1:
            told.append(drafts[0])
            cache = proposer.runner.cache.layers[0] if hasattr(proposer, "runner") else proposer.kv
            kept[:] = [t.clone() for t in cache.read(torch.tensor(request.blocks), request.computed)]
        return drafts

    proposer.propose = propose
    result = llm.generate([prompt], SamplingParams(max_tokens=n, **GREEDY))[0]
    del proposer.propose
    return result, told, kept


@pytest.mark.parametrize("method", ["draft_model", "mtp", "eagle"])
def test_drafts_after_a_prefix_hit_are_those_without_one(method, folders):
    """Block ends are where it matters: in every block that is found, what follows was once another token."""
    options = {"device": "cpu", "dtype": "float32", "speculative_config": spec(folders, method)}
    with LLM(folders / "mla_moe", **options) as llm:
        n = llm.runner.cache.block_tokens
        assert n == 16
        prompt = prompts(160, (5 * n + 4,))[0]
        others = [[*prompt[: k * n], (prompt[k * n] + 1) % 160, *prompt[k * n + 1 : k * n + 9]] for k in (1, 2, 3, 4)]
        end = prompt[: 4 * n - 1]  # its last step fills a block, and then it is over
        with LLM(folders / "mla_moe", enable_prefix_caching=False, **options) as plain:
            want, drafts, entries = drafted_for(plain, prompt)
        for first in (others, others[::-1], [end], [*others, end, prompt]):
            llm.engine.pools.clear()
            for p in first:  # each alone, so that later ones share the blocks of earlier ones
                llm.generate([p], SamplingParams(max_tokens=1 if p is end else 3, **GREEDY))
            got, found, cached = drafted_for(llm, prompt)
            assert got.timings.cached_tokens >= 3 * n, "a hit"
            assert got.token_ids == want.token_ids and found == drafts
            assert sum(map(len, found)) >= 10 and entries
            for a, b in zip(cached, entries, strict=True):
                assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_a_block_ends_where_the_next_token_differs(folders):
    """A drafting layer's blocks are known by one token more; other methods share all that is equal."""
    for method, shared in (("mtp", 1), ("draft_model", 2), ("ngram", 2)):
        with LLM(folders / "mla_moe", device="cpu", dtype="float32", speculative_config=spec(folders, method)) as llm:
            p = prompts(160, (40,))[0]
            llm.generate([p], SamplingParams(max_tokens=2, **GREEDY))
            same = llm.generate([[*p[:36], 1, 2]], SamplingParams(max_tokens=2, **GREEDY))[0]
            other = llm.generate([[*p[:32], (p[32] + 1) % 160, 5]], SamplingParams(max_tokens=2, **GREEDY))[0]
            assert same.timings.cached_tokens == 32 and other.timings.cached_tokens == 16 * shared


# ------------------------------------------------------------------ pauses


@pytest.mark.parametrize("method", ["draft_model", "mtp", "eagle"])
def test_text_stays_the_same_through_pauses(method, folders, monkeypatch):
    """While drafting is paused, entries are not written; afterwards a draft model reads what it missed, and layers
    draft for new sequences alone. Nothing is remembered of ended ones."""
    pauses = lambda control: control.steps % 12 >= 6  # noqa: E731
    monkeypatch.setattr(DraftControl, "is_paused", property(pauses))
    monkeypatch.setattr(DraftControl, "limit", lambda control, request: 0 if pauses(control) else control.maximum)
    every, params = prompts(160, (20, 5, 33, 16)), SamplingParams(max_tokens=41, **GREEDY)
    options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2}
    with LLM(folders / "mla_moe", **options) as llm:
        want = [r.token_ids for r in llm.generate(every, params)]
    config = spec(folders, method, only_if_faster=True)
    with LLM(folders / "mla_moe", **options, speculative_config=config) as llm:
        got = [r.token_ids for r in llm.generate(every, params)]
        drafted = llm.engine.stats()["spec_decode_num_draft_tokens_total"]
        again = [r.token_ids for r in llm.generate([e + t for e, t in zip(every, got)], params)]  # behind such blocks
        speculator = llm.engine.speculator
        assert not speculator.proposer.missing and not speculator.lengths.control._of
    assert got == want and drafted > 0
    with LLM(folders / "mla_moe", **options) as llm:
        assert again == [r.token_ids for r in llm.generate([e + t for e, t in zip(every, want)], params)]


def test_a_draft_model_reads_what_it_missed(folders, monkeypatch):
    """Its drafts stand after a pause as before; where it missed too much, it makes none."""
    for most, accepts in ((100, True), (3, False)):
        monkeypatch.setattr(network, "MOST_MISSING", most)
        pauses = lambda control: 4 <= control.steps < 12  # noqa: E731
        monkeypatch.setattr(DraftControl, "is_paused", property(pauses))
        monkeypatch.setattr(DraftControl, "limit", lambda control, request: 0 if pauses(control) else 3)  # noqa: B023
        config = {"method": "draft", "model": folders / "gqa", "num_speculative_tokens": 3}
        with LLM(folders / "gqa", device="cpu", dtype="float32", speculative_config=config) as llm:
            llm.generate(prompts(160, (33,)), SamplingParams(max_tokens=41, **GREEDY))
            stats = llm.engine.stats()
        drafted, accepted = (stats[f"spec_decode_num_{x}_tokens_total"] for x in ("draft", "accepted"))
        assert drafted == accepted and (accepted > 20) == accepts  # four steps before the pause have 12


# ------------------------------------------------------------------ loading


def test_a_draft_model_is_loaded_apart(folders):
    config = spec(folders, "draft_model", draft_dtype="bfloat16", draft_kv_cache_dtype="int8")
    with LLM(folders / "mla_moe", device="cpu", dtype="float32", speculative_config=config) as llm:
        mine, draft = llm.runner, llm.runner.draft
        assert (mine.dtype, draft.dtype) == (torch.float32, torch.bfloat16)
        assert {x.kv_dtype for x in mine.plan.layouts.values()} == {"auto"}
        assert {x.kv_dtype for x in draft.plan.layouts.values()} == {"int8"}
        assert (mine.cache.blocks, mine.cache.block_tokens) == (draft.cache.blocks, draft.cache.block_tokens)
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=9, **GREEDY))[0].token_ids) == 9
    assert draft.cache is None and not draft.steps and not draft.loaded.packed


@pytest.mark.parametrize("method", ["draft_model", "mtp", "eagle"])
def test_the_budget_holds_both_caches(method, folders):
    blocks = {}
    for name, config in (("plain", None), ("drafting", spec(folders, method))):
        with LLM(
            folders / "mla_moe", device="cpu", dtype="float32", kv_cache_bytes=400_000, speculative_config=config
        ) as llm:
            blocks[name] = llm.runner.cache.blocks
            runners = [r for r in (llm.runner, llm.runner.draft) if r is not None]
            stored = sum(t.nbytes for r in runners for layer in r.cache.layers for t in (*layer.entries, *layer.scales))
            spare = sum(
                t[-1:].nbytes for r in runners for layer in r.cache.layers for t in (*layer.entries, *layer.scales)
            )
            assert stored - spare <= 400_000  # one slot for padding lies outside of the blocks
    assert blocks["drafting"] < blocks["plain"]


def with_config(source, folder, **changes):
    noisy_copy(source, folder, noise=0.0)
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | changes))
    return folder


def test_unfit_drafters_are_refused(folders, tmp_path):
    random_model(llama_config(vocab_size=150), seed=1).save_pretrained(tmp_path / "vocab")
    eagle_head(tmp_path / "width", width=32, vocab=160)
    eagle_head(tmp_path / "words", width=64, vocab=170)
    short = with_config(folders / "gqa", tmp_path / "short", max_position_embeddings=128)
    layers = with_config(folders / "gqa-eagle", tmp_path / "layers", num_hidden_layers=2)
    for method, name, error, match in (
        ("draft_model", tmp_path / "vocab", UsageError, "vocabulary of 150 tokens"),
        ("draft_model", short, UsageError, "128 positions"),
        ("draft_model", tmp_path / "nowhere", UsageError, "is no folder"),
        ("eagle", tmp_path / "width", UsageError, "hidden_size = 32"),
        ("eagle", tmp_path / "words", UsageError, "vocab_size = 170"),
        ("eagle", layers, UnsupportedModelError, "2 layers"),
        (
            "eagle",
            with_config(folders / "gqa", tmp_path / "none", num_hidden_layers=1),
            CheckpointError,
            "no EAGLE head: the checkpoint lacks fc.weight",
        ),
    ):
        config = {"method": method, "model": name}
        with pytest.raises(error, match=match):
            LLM(folders / "gqa", device="cpu", dtype="float32", speculative_config=config)
    with LLM(
        folders / "gqa",
        device="cpu",
        max_model_len=128,
        speculative_config={"method": "draft_model", "model": short},
    ) as llm:
        assert llm.runner.draft.max_model_len == 128


def test_blocks_of_another_size_are_refused(folders, monkeypatch):
    def layouts(self, request, dtype):
        return [paged_layout(32 if request.kind == "gqa" else 16)]

    monkeypatch.setattr(type(host().backend("cpu")), "kv_layouts", layouts)
    with pytest.raises(UsageError, match="KV blocks of 16 tokens"):
        LLM(folders / "mla_moe", device="cpu", speculative_config=spec(folders, "draft_model", "gqa"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "eagle"},
        {"method": "draft_model"},
        {"method": "ngram", "model": "demo-draft"},
    ],
)
def test_who_needs_a_draft_says_so(wrong):
    with pytest.raises(UsageError, match="model"):
        LLM("demo", device="cpu", speculative_config=wrong)


# ------------------------------------------------------------------ windows


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A model that attends to 20 tokens, which drafts for itself."""
    folder = tmp_path_factory.mktemp("windowed")
    random_model(
        MistralConfig(**{**SMALL, "sliding_window": 20, "max_position_embeddings": 512}), seed=3
    ).save_pretrained(folder)
    return folder


def beside(folder, others, **more):
    """Tokens, accepted drafts and steps of a short request, into whose run `others` come."""
    words = {"method": "draft_model", "model": folder, "num_speculative_tokens": 3}
    options = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 300,
        "speculative_config": words,
    }
    with LLM(folder, **options) as llm:
        short = llm.add(prompts(160, (12,))[0], SamplingParams(max_tokens=40, ignore_eos=True, seed=7, **more), 0)
        llm.engine.step()
        llm.engine.step()
        for prompt in others:
            llm.add(prompt, SamplingParams(max_tokens=1, **GREEDY), 1)
        while llm.engine.busy:
            llm.engine.step()
        count = llm.engine.metrics.counters
        return (
            short.generated,
            count["spec_decode_num_accepted_tokens_total"],
            count["spec_decode_num_draft_tokens_total"],
        )


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_long_chunk_leaves_the_drafts_of_others_alone(windowed, temperature):
    """A chunk beyond the window is drafted over while its table still holds all of its blocks."""
    alone = beside(windowed, [], temperature=temperature)
    assert beside(windowed, prompts(160, (280,), seed=2), temperature=temperature) == alone
    assert temperature or alone[1] == alone[2] > 20
