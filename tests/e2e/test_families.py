"""The first config of each newer family against transformers; `make test-families` has the others, and more of each."""

from __future__ import annotations

import pytest
import torch

from inferplane import LLM
from tests.e2e.tiny_models import random_model
from tests.families.cases import CASES, config_of
from tests.families.parity import compare_prompts, compare_ragged, pair_of


@pytest.mark.parametrize("family", CASES)
def test_first_config(family, tmp_path):
    """Prompts as a whole, and ragged steps."""
    with pair_of(family, next(iter(CASES[family])), tmp_path) as (model, llm):
        compare_prompts(model, llm, (101, 1), 1000)
        compare_ragged(model, llm, (1, 9, 16, 33, 60))


def test_weights_of_experts_whose_scores_are_near_zero(tmp_path):
    """LFM2 adds 1e-6 to the sum of a token's scores. One expert is chosen, by the bias, and its score is often less."""
    model = random_model(config_of("lfm2_moe", "mixed", num_experts_per_tok=1)).to(torch.float32)
    for layer in model.model.layers[1:]:
        layer.feed_forward.gate.weight.data.mul_(80)
        layer.feed_forward.expert_bias.copy_(torch.arange(8.0) * 2)
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, device="cpu", dtype="float32") as llm:
        compare_prompts(model, llm, (101,), 1000)


ZEROS = {
    "ernie4_5_moe": {"rms_norm_eps": 0.0, "moe_norm_min": 0.0},
    "nemotron_h": {"layer_norm_epsilon": 0.0},
    "cohere2": {"layer_norm_eps": 0.0},
}


@pytest.mark.parametrize("family", ZEROS)
def test_zero_is_an_epsilon(family, tmp_path):
    """What is added before a division, and what bounds a sum or a step from below, may be 0."""
    case = next(iter(CASES[family]))
    with pair_of(family, case, tmp_path, **ZEROS[family]) as (model, llm):
        compare_prompts(model, llm, (33,), 1000)
