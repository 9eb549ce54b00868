"""Phi-3 beyond its first context: sequences use the long factors, as in transformers (docs/decisions/0008)."""

from __future__ import annotations

import pytest

from inferplane import LLM
from tests.e2e.test_parity import FLOAT32, error
from tests.e2e.tiny_models import logits_of, prompts, random_model
from tests.families.cases import config_of


@pytest.mark.parametrize("chunk_tokens", [1000, 7])
def test_long_factors(chunk_tokens, tmp_path):
    model = random_model(config_of("phi3", "partial", original_max_position_embeddings=16))
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="all sequences use the factors for more than 16 tokens"):
        llm = LLM(tmp_path, device="cpu", dtype="float32")
    with llm:
        many = prompts(160, (101, 17, 33))
        for ids, got in zip(many, llm.logits(many, chunk_tokens=chunk_tokens)):
            assert error(got, logits_of(model, ids)) <= FLOAT32
