"""A model whose layers attend to different numbers of tokens: memory is given back, and no answer changes.

Its layers are two with all tokens and six with a window of 13, so a sequence has four block tables of two layers each.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from benchmarks.cache_groups import MAX_HELD, MIN_SHARE, SHAPES, TOKENS, compare_estimates, fill_pool
from inferplane import LLM, SamplingParams
from inferplane.cli import main
from inferplane.engine.runner import planned_model
from inferplane.engine.runner.estimate import estimate
from inferplane.kvcache import single_table
from tests.e2e.drafters import eagle_head, noisy_copy
from tests.e2e.mixtures import check_same_answers
from tests.e2e.tiny_models import config_of, prompts, random_model

WINDOW = 13
TYPES = 2 * ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
LENGTHS = (140, 37, 64, 42, 140)
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 200}
SETTINGS = {"temperature": 0, "ignore_eos": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
EAGLE = {"method": "eagle", "num_speculative_tokens": 3}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model, an EAGLE head for it, and a draft model without windows."""
    made = {name: tmp_path_factory.mktemp("groups") / name for name in ("model", "eagle", "draft_model")}
    config = config_of(
        "qwen3",
        "window",
        num_hidden_layers=len(TYPES),
        layer_types=TYPES,
        sliding_window=WINDOW,
        max_position_embeddings=256,
    )
    random_model(config, seed=3).save_pretrained(made["model"])
    eagle_head(made["eagle"], width=config.hidden_size, vocab=config.vocab_size)
    noisy_copy(made["model"], made["draft_model"])
    return made


def requests(vocab=160):
    """Prompts, some with a common beginning or that repeat themselves, and how many tokens each wants."""
    each = prompts(vocab, LENGTHS)
    each[3] = each[3][:7] * 6
    each[4] = each[0][:135] + each[4][:5]
    return each, [SamplingParams(max_tokens=n, **SETTINGS) for n in (24, 40, 3, 40, 20)]


@pytest.fixture(scope="module")
def alone(folders):
    """What each prompt gets alone, in one chunk, without a prefix cache, with one block table for all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_model, "deal_layers", lambda layers, drafting, also, form: single_table(layers, also))
        with LLM(folders["model"], enable_prefix_caching=False, **OPTIONS) as llm:
            assert llm.engine.scheduler.tables.windows == (None,)
            return [llm.generate([p], q)[0].token_ids for p, q in zip(*requests())]


CASES = {
    "batches of 3": {"max_num_seqs": 3},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "pools of their own, few blocks": {"blocks": 8, "pools": 2},
    "pools of their own, few blocks, eagle drafts": {"speculative_config": EAGLE, "blocks": 8, "pools": 2},
    "pools of their own, drafts of a model": {"speculative_config": DRAFT, "pools": 2},
    "pools of their own, n-gram drafts": {"speculative_config": NGRAM, "pools": 2, "max_num_batched_tokens": 19},
    "chunks of 50, few blocks": {"max_num_batched_tokens": 50, "blocks": 24},
    "n-gram drafts": {"speculative_config": NGRAM},
    "n-gram drafts, few blocks, chunks of 19": {
        "speculative_config": NGRAM,
        "blocks": 24,
        "max_num_batched_tokens": 19,
    },
    "eagle drafts, few blocks": {"speculative_config": EAGLE, "blocks": 24},
    "drafts of a model": {"speculative_config": DRAFT},
    "drafts of a model, few blocks, chunks of 19": {
        "speculative_config": DRAFT,
        "blocks": 24,
        "max_num_batched_tokens": 19,
    },
}


def keep_forms_apart(monkeypatch):
    """Deal layers as if those with a window had entries of another form."""
    deal = planned_model.deal_layers
    monkeypatch.setattr(
        planned_model, "deal_layers", lambda layers, drafting, also, form: deal(layers, drafting, also, lambda r: r)
    )


@pytest.mark.parametrize("case", CASES)
def test_same_answer(case, folders, alone, monkeypatch):
    options = dict(CASES[case])
    pools = options.pop("pools", 1)
    if pools == 2:
        keep_forms_apart(monkeypatch)
    if (spec := options.get("speculative_config")) in (EAGLE, DRAFT):
        options["speculative_config"] = spec | {"model": folders[spec["method"]]}
    if blocks := options.pop("blocks", None):
        options["kv_cache_bytes"] = blocks * bytes_per_block(folders, options.get("speculative_config"))
    with LLM(folders["model"], **OPTIONS, **options) as llm:
        assert llm.engine.scheduler.tables.windows == (None, *[WINDOW] * (3 if pools == 1 else 1))
        assert len(llm.engine.pools.pools) == pools
        every, params = requests()
        stats = check_same_answers(llm, every, params, alone, preempts=bool(blocks))
        assert spec is None or stats["spec_decode_num_draft_tokens_total"] > 0


def test_estimate_and_engine_divide_a_budget_alike(folders, monkeypatch):
    keep_forms_apart(monkeypatch)
    with LLM(folders["model"], **OPTIONS, kv_cache_bytes=400_000, max_num_seqs=3) as llm:
        cache, runner = llm.runner.cache, llm.runner
        assert cache.pools == estimate(runner, None, 64).blocks(400_000) and cache.blocks == min(cache.pools)
        assert [kv.blocks for kv in cache.layers] == [cache.pools[window] for window in runner.tables.table_of]
        held = sum(t.numel() * t.element_size() for kv in cache.layers for t in kv.entries)
        slack = sum(t[-1:].numel() * t.element_size() for kv in cache.layers for t in kv.entries)
        assert held - slack <= 400_000


def bytes_per_block(folders, spec):
    """Bytes of a block of the cache, a draft model's included."""
    with LLM(folders["model"], **OPTIONS, max_num_seqs=1, speculative_config=spec) as llm:
        runners = (llm.runner, *filter(None, [llm.runner.draft]))
        return sum(runner.block_bytes() for runner in runners)


def test_a_long_sequence_holds_its_windows_only(folders):
    """Measured while it runs, in blocks that all tables take from one pool, and as `estimate` says."""
    with LLM(folders["model"], **OPTIONS, max_num_batched_tokens=64) as llm:
        block, tables = llm.runner.cache.block_tokens, llm.runner.tables
        assert [tables.table_of.count(i) for i in range(4)] == [2, 2, 2, 2] and len(tables.storages) == 2
        memory = {t.data_ptr() for kv in llm.runner.cache.layers for t in kv.entries}
        assert len(memory) == 2 * 2, "K and V of two storages"
        request = llm.add(prompts(160, (150,))[0], SamplingParams(max_tokens=40, **SETTINGS), 0)
        while llm.engine.busy:
            llm.engine.step()
            if request.tables:
                full, *windowed = ([*t.held] for t in request.tables)
                assert len(full) == -(-max(request.computed, 150) // block)
                stop, first = -(-request.computed // block), max(0, request.computed + 1 - WINDOW) // block
                assert all(len(held) == stop - first for held in windowed)
                assert llm.engine.pools.used == len(full) + 3 * len(windowed[0])


def test_a_prefix_is_found_in_all_tables(folders, alone):
    """Two requests share 135 tokens; the second finds the full blocks among them."""
    every, params = requests()
    with LLM(folders["model"], **OPTIONS) as llm:
        block = llm.runner.cache.block_tokens
        llm.generate([every[0]], params[0])

        def hits(prompt):
            before = llm.engine.stats()["prefix_cache_hits_total"]
            assert llm.generate([prompt], params[4])[0].token_ids == alone[4]
            return llm.engine.stats()["prefix_cache_hits_total"] - before

        assert hits(every[4]) == 135 // block * block > 0
        llm.engine.pools.clear()
        assert hits(every[4]) == 0


def test_whole_prompts_and_embeddings_know_tables(folders):
    every, _ = requests()
    with LLM(folders["model"], **OPTIONS) as llm:
        whole = llm.logits([every[0]])[0]
        parts = llm.logits([every[0]], chunk_tokens=7)[0]
        assert (whole - parts).abs().max() < 1e-4 and llm.engine.pools.used == 0


def run_estimate(config, device, memory, folder, capsys):
    """`inferplane estimate` in this process; returns its JSON."""
    (folder / "config.json").write_text(json.dumps(config))
    words = ("estimate", str(folder / "config.json"), "--device", device, "--memory", str(memory), "--json")
    assert main.main([*words]) == main.DONE
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", SHAPES)
def test_estimates_of_published_models(name, tmp_path, capsys, monkeypatch):
    """32,768 tokens of a model hold what its layers must keep, and little more."""
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    shape, run = SHAPES[name], partial(run_estimate, folder=tmp_path, capsys=capsys)
    found = compare_estimates(shape, TOKENS, "cpu", run)
    assert 1 <= found["held"] <= MAX_HELD and found["gain"] >= MIN_SHARE * shape.possible_gain(TOKENS)


@pytest.mark.filterwarnings("ignore:kv_cache_bytes")
@pytest.mark.parametrize(("name", "layers", "tokens"), [("gpt-oss-20b", 4, 1024), ("gemma-3-1b", 12, 2048)])
def test_a_pool_full_of_sequences(name, layers, tokens):
    """Few layers and short sequences; the benchmark has all of them. A pool holds whole sequences: up to one less."""
    shape = replace(SHAPES[name], layers=layers)
    found = fill_pool(shape, tokens, 256, "cpu", pools=4)
    possible = shape.possible_gain(tokens)
    assert 1 <= found["held"] <= MAX_HELD
    assert found["sequences"] + 1 >= 4 * MIN_SHARE * possible > 6
