"""Thoughts before answers, their limits, and structural tags, from the request to the text."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import pytest

pytest.importorskip("llguidance", reason="not run: the extra `constrained` is not installed")

from tokenizers import AddedToken

from inferplane import LLM, AsyncLLM, SamplingParams
from inferplane.errors import UsageError
from tests.e2e.tiny_llm import one, opened, write
from tests.e2e.tiny_tokenizers import byte_level

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
FORCED = "\nSo.\n</think>\n"
SPAN = {"begin": "<think>", "end": "</think>", "is_open": True, "max_tokens": 7, "forced_end": FORCED}
PROMPT = "The quick brown fox jumps. The quick brown fox jumps. The quick"
TAG = {"trigger": "<call>", "grammar": 'start: /[0-9]{2,5}/ "</call>"'}


def with_marks():
    made = byte_level()
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>", "<call>")])
    made.add_special_tokens(["<|call|>"])
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("thinking"), with_marks)


@pytest.fixture(scope="module")
def llm(folder):
    with opened(folder) as made:
        yield made


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text, special=False)


CASES = {
    "a limit": {"reasoning": SPAN},
    "a limit and drawn tokens": {"reasoning": SPAN, "temperature": 1.0, "seed": 5},
    "a limit, then JSON": {"reasoning": SPAN, "json_schema": {"enum": ["yes", "no", 12]}},
    "no thought, then a constraint": {"reasoning": {**SPAN, "is_open": False}, "regex": "[ab]{3}"},
    "tags": {"structural_tags": [TAG], "logit_bias_of": {"<call>": 9.0}, "temperature": 1.0, "seed": 6},
    "a limit, then tags": {"reasoning": SPAN, "structural_tags": [TAG], "logit_bias_of": {"<call>": 100.0}},
}


def params_of(llm: LLM, case: str) -> SamplingParams:
    given = dict(CASES[case])
    bias = {i: b for text, b in given.pop("logit_bias_of", {}).items() for i in ids_of(llm, text)}
    return SamplingParams(**{"max_tokens": 30, "temperature": 0, "ignore_eos": True, "logit_bias": bias, **given})


def check(llm: LLM, case: str, result) -> None:
    """What the case's rules say of a text."""
    params = params_of(llm, case)
    text, forced = result.text, ids_of(llm, FORCED)
    if params.reasoning is not None and params.reasoning.is_open:
        assert result.token_ids[7 : 7 + len(forced)] == forced and result.reasoning_tokens == 7 + len(forced)
        text = text.partition(FORCED)[2]
    else:
        assert result.reasoning_tokens == 0
    if params.json_schema is not None:
        assert json.loads(text) in ("yes", "no", 12)
    if params.regex is not None:
        assert re.fullmatch(params.regex, text)
    if params.structural_tags:
        called = text.split("<call>")[1:]
        assert called and all(re.match(r"[0-9]{2,5}</call>", part) for part in called[:-1]), text
        assert re.match(r"[0-9]{0,5}($|<$|</)|[0-9]{2,5}</call>", called[-1]), text


@pytest.mark.parametrize("case", CASES)
def test_the_rules_hold(llm, case):
    result = llm.generate(PROMPT, params_of(llm, case))[0]
    check(llm, case, result)
    pieces = list(llm.stream(PROMPT, params_of(llm, case)))
    counts = [p.reasoning_tokens for p in pieces]
    assert counts == sorted(counts) and counts[-1] == result.reasoning_tokens == pieces[-1].timings.reasoning_tokens
    assert "".join(p.text for p in pieces) == result.text


@pytest.mark.parametrize("case", CASES)
def test_the_same_with_drafts_with_little_memory_and_together(llm, folder, case):
    """Drafts of n-grams, tokens computed again after preemption, and three sequences of one prompt in one batch."""
    params = params_of(llm, case)
    prompts = [PROMPT[i:] for i in range(4)]
    expected = llm.generate(prompts, params)
    options = {"speculative_config": {**NGRAM, "verify_strategy": "target_match"}, "enable_prefix_caching": False}
    memory = {"max_model_len": 64, "kv_cache_bytes": 6 * llm.runner.block_bytes()}
    with opened(folder, **options, **memory) as other:
        found = other.generate(prompts, params)
        assert [r.token_ids for r in found] == [r.token_ids for r in expected]
        assert [r.reasoning_tokens for r in found] == [r.reasoning_tokens for r in expected]
        stats = other.engine.stats()
    assert stats["num_preemptions_total"] > 0 and stats["spec_decode_num_draft_tokens_total"] > 0
    several = llm.generate(PROMPT, replace(params, n=3, temperature=1.0, seed=3))[0]
    for sample in several.samples:
        check(llm, case, sample)
    assert len({tuple(s.token_ids) for s in several.samples}) > 1


@pytest.mark.parametrize("process", [False, True])
def test_async_engines_count_alike(llm, folder, process):
    case = "a limit, then JSON"

    async def go():
        options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32}
        async with AsyncLLM(str(folder), process=process, **options) as served:
            return [piece async for piece in served.generate(PROMPT, params_of(llm, case))]

    pieces, expected = asyncio.run(go()), llm.generate(PROMPT, params_of(llm, case))[0]
    assert [i for p in pieces for i in p.token_ids] == expected.token_ids
    assert pieces[-1].reasoning_tokens == expected.reasoning_tokens == pieces[-1].timings.reasoning_tokens > 7


def test_stop_strings_count_behind_the_thought(llm):
    forced = "\n</think>\n\n"
    params = {**SPAN, "max_tokens": 3, "forced_end": forced}
    options = {"reasoning": params, "regex": "Yes[.]\n\nNo[.]", "max_tokens": 60, "ignore_eos": False}
    whole, cut = one(llm, PROMPT, **options), one(llm, PROMPT, stop="\n\n", **options)
    assert whole.text.partition(forced)[2] == "Yes.\n\nNo."
    assert cut.text == whole.text.removesuffix("\n\nNo.") and cut.finish_reason == "stop"
    assert (
        "".join(p.text for p in llm.stream(PROMPT, SamplingParams(stop="\n\n", temperature=0, **options))) == cut.text
    )


def test_an_end_token_that_is_visible(llm):
    (call,) = llm.tokenizer.find_ids(["<|call|>"])
    options = {"stop_token_ids": [call], "logit_bias": {call: 100.0}, "max_tokens": 3}
    hidden, shown = one(llm, PROMPT, **options), one(llm, PROMPT, visible_tokens=["<|call|>"], **options)
    assert hidden.token_ids == shown.token_ids == [call] and hidden.finish_reason == shown.finish_reason == "stop"
    assert hidden.text == "" and shown.text == "<|call|>"


def test_what_cannot_be_done_is_said(llm, tmp_path):
    with pytest.raises(UsageError, match=r"structural_tags: the grammar after '<call>' is refused"):
        one(llm, structural_tags=[{"trigger": "<call>", "grammar": "start: missing"}])
    ids = write(tmp_path, None)
    with opened(ids) as plain, pytest.raises(UsageError, match="reasoning span has marks that are text"):
        plain.generate([[5, 6]], SamplingParams(reasoning=SPAN))
