"""Greedy tokens at float32 are the same whatever the batch, chunks, room, prefix cache, drafts and streams."""

import math
import random

import pytest
import torch

from inferplane import LLM, SamplingParams
from tests.e2e.drafters import eagle_head, noisy_copy, with_mtp
from tests.e2e.mixtures import check_same_answers
from tests.e2e.tiny_models import config_of, deepseek_config, llama_config, prompts, random_model

LENGTHS = (40, 7, 23, 1, 33, 12, 40, 18)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "only_if_faster": False}
MTP = {"method": "mtp", "num_speculative_tokens": 3, "only_if_faster": False}
EAGLE = {"method": "eagle", "num_speculative_tokens": 3, "only_if_faster": False}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 4, "only_if_faster": False}
MODELS = ("gqa", "gqa_moe", "mla_moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models with grouped queries, dense and with experts, and one with latent attention, experts and an MTP module."""
    made = {}
    configs = (llama_config(), config_of("qwen3_moe", "plain"), deepseek_config(num_hidden_layers=2))
    for name, config in zip(MODELS, configs):
        made[name] = tmp_path_factory.mktemp(name)
        random_model(config, seed=3).save_pretrained(made[name])
    with_mtp(made["mla_moe"])
    for name in MODELS:
        made[name, "eagle"] = tmp_path_factory.mktemp("heads") / name
        eagle_head(made[name, "eagle"], width=64, vocab=160)
        made[name, "draft_model"] = tmp_path_factory.mktemp("drafts") / name
        noisy_copy(made[name], made[name, "draft_model"])
    return made


def asked(vocab=160):
    """Prompts, some with a common beginning or that repeat themselves, and how many tokens each wants."""
    each = prompts(vocab, LENGTHS)
    each[6] = each[0][:35] + each[6][:5]
    each[7] = each[7][:6] * 3
    return each, [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (14, 20, 9, 16, 3, 12, 11, 18)]


@pytest.fixture(scope="module")
def alone(folders):
    """What each prompt gets alone, in one chunk, without a prefix cache."""
    found = {}
    for name in MODELS:
        folder = folders[name]
        with LLM(folder, device="cpu", dtype="float32", enable_prefix_caching=False) as llm:
            found[name] = [llm.generate([p], q)[0].token_ids for p, q in zip(*asked())]
    return found


CASES = {
    "batches of 3": {"max_num_seqs": 3},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "chunks of 17": {"max_num_batched_tokens": 17, "max_num_seqs": 5},
    "little room": {"room": 2.5},
    "steps ahead": {"async_scheduling": "on"},
    "steps ahead, batches of 3, chunks of 5": {
        "async_scheduling": "on",
        "max_num_seqs": 3,
        "max_num_batched_tokens": 5,
    },
    "steps ahead, little room": {"async_scheduling": "on", "room": 1.5},
    "steps ahead, n-gram drafts": {"async_scheduling": "on", "speculative_config": NGRAM},
    "n-gram drafts": {"speculative_config": NGRAM},
    "n-gram drafts, little room, chunks of 9": {"speculative_config": NGRAM, "room": 1.5, "max_num_batched_tokens": 9},
    "mtp drafts": {"speculative_config": MTP},
    "mtp drafts, little room, chunks of 9": {"speculative_config": MTP, "room": 1.5, "max_num_batched_tokens": 9},
    "eagle drafts": {"speculative_config": EAGLE},
    "eagle drafts, little room, chunks of 9": {"speculative_config": EAGLE, "room": 1.5, "max_num_batched_tokens": 9},
    "drafts of a model": {"speculative_config": DRAFT},
    "drafts of a model, little room, chunks of 9": {
        "speculative_config": DRAFT,
        "room": 1.5,
        "max_num_batched_tokens": 9,
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_same_answer(model, case, folders, alone):
    options = dict(CASES[case])
    if options.get("speculative_config") is MTP and model != "mla_moe":
        pytest.skip("not run: the model has no MTP layer")
    if (spec := options.get("speculative_config")) in (EAGLE, DRAFT):
        options["speculative_config"] = spec | {"model": folders[model, spec["method"]]}
    room = options.pop("room", None)
    if room:
        options["kv_cache_bytes"] = bytes_for(folders[model], room, options.get("speculative_config"))
    with LLM(folders[model], device="cpu", dtype="float32", max_model_len=64, **options) as llm:
        every, params = asked()
        stats = check_same_answers(llm, every, params, alone[model], preempts=room is not None)
        if "speculative_config" in options:
            assert stats["spec_decode_num_draft_tokens_total"] > 0
            assert spec != DRAFT or stats["spec_decode_num_accepted_tokens_total"] > 0
        if options.get("async_scheduling") == "on" and "speculative_config" not in options:
            assert stats["overlapped_steps_total"] > 10


def bytes_for(folder, sequences, speculative):
    """Cache bytes for this many sequences of the longest kind."""
    with LLM(
        folder, device="cpu", dtype="float32", max_model_len=64, max_num_seqs=8, speculative_config=speculative
    ) as llm:
        a_block = sum(a_block_of(runner) for runner in (llm.runner, llm.runner.draft) if runner is not None)
        return int(sequences * math.ceil(64 / llm.runner.cache.block_tokens)) * a_block


def a_block_of(runner):
    """Bytes of a block in every layer's cache."""
    asks = [layer.kv_requests()[0] for layer in (*runner.model.layers, *runner.model.mtp)]
    return sum(runner.plan.layouts[r].bytes_per_block(r, torch.float32) for r in asks)


@pytest.mark.parametrize("model", MODELS)
def test_any_number_together_and_as_streams(model, folders, alone):
    every, params = asked()
    with LLM(folders[model], device="cpu", dtype="float32", max_num_seqs=32) as llm:
        for n in (*range(1, 9), 13, 21, 32):
            which = [i % len(every) for i in range(n)]
            got = llm.generate([every[i] for i in which], [params[i] for i in which])
            assert [r.token_ids for r in got] == [alone[model][i] for i in which], f"{n} together"
        streams = [llm.stream(p, q) for p, q in zip(every, params)]
        told = [[] for _ in streams]
        left = dict(enumerate(streams))
        draw = random.Random(1)
        while left:  # pieces are asked for in any order
            i = draw.choice(sorted(left))
            piece = next(left[i], None)
            if piece is None:
                del left[i]
            else:
                told[i] += piece.token_ids
        assert told == alone[model]
