"""Every config of the newer families against transformers; `make test-families` runs it."""

from __future__ import annotations

import pytest
import torch

from inferplane import SamplingParams
from tests.e2e.tiny_models import prompts
from tests.families.cases import CASES
from tests.families.parity import compare_prompts, compare_ragged, pair_of

ALL = [(family, case) for family, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module", params=ALL, ids="-".join)
def pair(request, tmp_path_factory):
    with pair_of(*request.param, tmp_path_factory.mktemp("model")) as both:
        yield both


@pytest.mark.parametrize("chunk_tokens", [1000, 7, 1])
def test_prompts_in_chunks(pair, chunk_tokens):
    compare_prompts(*pair, (101, 37, 1), chunk_tokens)


def test_ragged_steps(pair):
    compare_ragged(*pair, (1, 8, 9, 16, 33, 64, 90))


def test_greedy_tokens(pair):
    """64 tokens each, more prompts than the batch holds, one longer than a step."""
    model, llm = pair
    many = prompts(llm.engine.vocab, (5, 1, 70, 17, 29), seed=3)
    for ids, result in zip(many, llm.generate(many, SamplingParams(max_tokens=64, temperature=0))):
        inputs = torch.tensor([ids])
        want = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=64, do_sample=False)
        assert result.token_ids == want[0, len(ids) :].tolist() and len(result.token_ids) == 64
    assert llm.engine.pools.used == 0


def test_every_family_has_two_configs():
    assert all(len(cases) >= 2 for cases in CASES.values())
