"""Greedy tokens at float32 of models with sinks, windows, states and chosen tokens are the same whatever the batch,
order, chunks, preemption, prefix cache, drafts, streams, and requests that are aborted beside them."""

from __future__ import annotations

import random

import pytest

from inferplane import LLM, SamplingParams
from inferplane.kvcache import blocks_held
from tests.e2e.drafters import noisy_copy
from tests.e2e.mixtures import check_same_answers
from tests.e2e.tiny_models import llama_config, prompts, random_model
from tests.families.cases import CASES as FAMILY_CASES
from tests.families.cases import make
from tests.unit.support.fake_model import Script

MODELS = ("gpt_oss", "gemma3", "qwen3_5", "nemotron_h", "kimi_linear", "deepseek_v32", "glm_moe_dsa")
STATES = ("qwen3_5", "nemotron_h", "kimi_linear")
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 8}
LENGTHS = (40, 7, 23, 1, 33, 40)
COUNTS = (14, 20, 9, 16, 11, 12)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "only_if_faster": False}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 4, "only_if_faster": False}
FEW = {"room": 1.2, "max_num_batched_tokens": 9}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model of each family, and one that drafts for it: a noisy copy, or where there are states a model that has
    none and is hardly ever right."""
    at = tmp_path_factory.mktemp("models")
    for name in MODELS:
        make(name, next(iter(FAMILY_CASES[name])), at / name)
        if name in STATES:
            random_model(llama_config(), seed=3).save_pretrained(at / f"{name}-draft")
        else:
            noisy_copy(at / name, at / f"{name}-draft")
    return at


def requests():
    """Prompts, some with a common beginning or that repeat themselves, and how many tokens each gets."""
    each = prompts(160, LENGTHS)
    each[2] = each[2][:6] * 4
    each[5] = each[0][:35] + each[5][:5]
    return each, [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in COUNTS]


@pytest.fixture(scope="module")
def alone(folders):
    """What each prompt gets alone, in one chunk, without a prefix cache."""
    found = {}
    for name in MODELS:
        with LLM(folders / name, **{**OPTIONS, "max_num_seqs": 1}, enable_prefix_caching=False) as llm:
            found[name] = [llm.generate([p], q)[0].token_ids for p, q in zip(*requests())]
    return found


CASES = {
    "batches of 3": {"max_num_seqs": 3},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "few blocks, chunks of 17": {"room": 2.5, "max_num_batched_tokens": 17},
    "n-gram drafts": {"speculative_config": NGRAM},
    "n-gram drafts, few blocks, chunks of 9": {"speculative_config": NGRAM, **FEW},
    "right and wrong drafts": {"speculative_config": NGRAM, "script": "alternate"},
    "right and wrong drafts, few blocks, chunks of 9": {"speculative_config": NGRAM, "script": "alternate", **FEW},
    "drafts of a model": {"speculative_config": DRAFT},
    "drafts of a model, few blocks, chunks of 9": {"speculative_config": DRAFT, **FEW},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_same_answer(model, case, folders, alone):
    options = dict(CASES[case])
    spec = options.get("speculative_config")
    if spec is DRAFT:
        options["speculative_config"] = {**DRAFT, "model": folders / f"{model}-draft"}
    if room := options.pop("room", None):
        options["kv_cache_bytes"] = count_bytes(folders / model, room, options.get("speculative_config"))
    script = options.pop("script", None)
    with LLM(folders / model, **{**OPTIONS, **options}) as llm:
        every, params = requests()
        if script:
            draft_by_script(llm, script, every, alone[model])
        stats = check_same_answers(llm, every, params, alone[model], preempts=bool(room))
        drafts, accepted = (stats.get(f"spec_decode_num_{kind}_tokens_total", 0) for kind in ("draft", "accepted"))
        assert drafts > accepted > 0 if script else spec is None or drafts > 0
        check_nothing_is_lost(llm)


def draft_by_script(llm, kind, every, tokens):
    """Draft with a proposer that knows what each prompt gets."""
    expected = dict(zip(map(tuple, every), tokens))
    llm.engine.speculator.proposer = Script(kind, 4, lambda request: expected[tuple(request.prompt)])


@pytest.mark.parametrize("model", STATES)
def test_drafts_on_the_device_s_own_kernels(model, folders):
    """In bfloat16, in which the cpu backend computes whole blocks with states, and with one rounding for all steps."""
    options = {**OPTIONS, "dtype": "bfloat16", "deterministic": True}
    every, params = requests()
    with LLM(folders / model, **options) as llm:
        expected = [r.token_ids for r in llm.generate(every, params)]
    with LLM(folders / model, **options, speculative_config=NGRAM) as llm:
        draft_by_script(llm, "alternate", every, expected)
        assert [r.token_ids for r in llm.generate(every, params)] == expected
        stats = llm.engine.stats()
        assert stats["spec_decode_num_draft_tokens_total"] > stats["spec_decode_num_accepted_tokens_total"] > 0
        check_nothing_is_lost(llm)


def count_bytes(folder, sequences, speculative):
    """Bytes of the cache, a draft model's included, for so many of the longest sequences."""
    with LLM(folder, **OPTIONS, speculative_config=speculative) as llm:
        runners = (llm.runner, *filter(None, [llm.runner.draft]))
        blocks = blocks_held(llm.engine.scheduler.tables.windows, 54, 9, llm.runner.block_tokens)
        return int(sequences * blocks) * sum(runner.block_bytes() for runner in runners)


def check_nothing_is_lost(llm):
    scheduler = llm.engine.scheduler
    assert llm.engine.pools.used == 0
    llm.engine.pools.check()
    if scheduler.states is not None:
        assert scheduler.states.available == scheduler.states.total
        scheduler.states.check()


@pytest.mark.parametrize("spec", [None, NGRAM], ids=["plain", "n-gram drafts"])
@pytest.mark.parametrize("model", MODELS)
def test_streams_beside_aborted_ones(model, spec, folders, alone):
    """Pieces come in any order; every other stream is closed after some of them."""
    every, params = requests()
    with LLM(folders / model, **OPTIONS, speculative_config=spec) as llm:
        streams = [llm.stream(p, q) for p, q in zip([*every, *every], [*params, *params])]
        found, closed = [[] for _ in streams], set()
        left, draw = dict(enumerate(streams)), random.Random(1)
        while left:
            i = draw.choice(sorted(left))
            piece = next(left[i], None)
            found[i] += piece.token_ids if piece is not None else []
            if piece is None or (i % 2 and len(found[i]) > 3):
                left.pop(i).close()
                closed |= {i} if piece is not None else set()
        assert len(closed) > 3
        for i, tokens in enumerate(found):
            want = alone[model][i % len(every)]
            assert tokens == (want[: len(tokens)] if i in closed else want)
        check_nothing_is_lost(llm)
