"""DeepSeek-V4's files as they are published, against transformers' model with the values that they stand for."""

from __future__ import annotations

import pytest
import torch

from inferplane import LLM
from tests.e2e.published_v4 import publish
from tests.e2e.test_parity import FLOAT32, error
from tests.e2e.tiny_models import logits_of, prompts


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "fp8_and_mxfp4"])
def test_published_files(tmp_path, quantized):
    sizes = {"hidden_size": 160, "q_lora_rank": 136, "moe_intermediate_size": 96, "mlp_layer_types": None}
    with torch.no_grad():
        model = publish(tmp_path, "window", quantized=quantized, **sizes)
    with LLM(tmp_path, device="cpu", dtype="float32", max_num_seqs=3) as llm:
        assert not llm.runner.loaded.unused
        if quantized:
            formats = llm.runner.model.formats()
            assert {"fp8_block", "mxfp4"} <= formats
        many = prompts(llm.engine.vocab, (70, 9))
        for ids, got in zip(many, llm.logits(many, chunk_tokens=33)):
            assert error(got, logits_of(model, ids)) <= FLOAT32
