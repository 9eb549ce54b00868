"""Text parts with a form of their own inside multimodal models, against transformers' whole models."""

from __future__ import annotations

import pytest
import torch

from inferplane import LLM, SamplingParams
from tests.e2e.sharing import answers, share
from tests.e2e.test_ranks import SECONDS, same
from tests.e2e.tiny_models import prompts
from tests.families.cases import make
from tests.families.parity import compare_prompts, compare_ragged, pair_of
from tests.families.wholes import WHOLES

ALL = [(family, case) for family, (_, _, cases) in WHOLES.items() for case in cases]
pytestmark = pytest.mark.filterwarnings("ignore:Of .* the text part is read")


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


@pytest.mark.parametrize("family", WHOLES)
def test_two_ranks_answer_as_one(family, tmp_path):
    make(family, next(iter(WHOLES[family][2])), tmp_path / "model")
    with LLM(tmp_path / "model", device="cpu", dtype="float32", max_num_seqs=3, max_num_batched_tokens=48) as llm:
        want = answers(llm)
    share(tmp_path / "model", tmp_path / "out", seconds=SECONDS)
    same(torch.load(tmp_path / "out"), want)


def test_every_family_has_two_configs():
    assert all(len(cases) >= 2 for _, _, cases in WHOLES.values())
