"""Real models in GGUF: weights, logits and greedy text are those of transformers from the same file, in float32."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cpu.questions import QUESTIONS
from inferplane import LLM, SamplingParams
from inferplane.models.convert import convert
from tests.real_models.conftest import fetch_once

TOKENS = 48
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Im Jahre 1905 veröffentlichte Albert Einstein",
    "Water boils at a temperature of",
    "1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "A list of fruits: apples, pears,",
    "The quick brown fox jumps over the lazy dog. " * 70 + "Then the fox",
]
"""The last is longer than a window of 512 tokens."""

SAMPLING = SamplingParams(max_tokens=TOKENS, temperature=0)


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def model(request, tmp_path_factory):
    """A model's GGUF file, the folder that `inferplane convert` makes of it, and transformers' model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = fetch_once(request.param)
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    reference = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("converted") / request.param
    convert(file, folder)
    return file, folder, reference, AutoTokenizer.from_pretrained(**where)


def prompts_of(tokenizer):
    """The token ids of ten prompts: questions in the model's own template, or plain text for a base model."""
    if tokenizer.chat_template is None:
        return [tokenizer(text).input_ids for text in TEXTS]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        ).input_ids
        for text in QUESTIONS
    ]


def test_a_converted_folder_is_what_transformers_reads_from_the_file(model):
    from transformers import AutoModelForCausalLM

    _, folder, want, _ = model
    got = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = got.state_dict()
    assert tensors.keys() == want.state_dict().keys()
    for name, tensor in want.state_dict().items():
        assert torch.equal(tensors[name], tensor), name
    assert got.config.rms_norm_eps == pytest.approx(want.config.rms_norm_eps, rel=1e-6), "the same float32"
    for key in ("rope_parameters", "tie_word_embeddings", "eos_token_id", "max_position_embeddings"):
        assert getattr(got.config, key, None) == getattr(want.config, key, None), key


def test_logits_and_greedy_text(model):
    """Logits differ by at most 1e-5 of the largest; the text is the same."""
    file, _, reference, tokenizer = model
    many = prompts_of(tokenizer)
    with LLM(file, device="cpu", dtype="float32", quantization=None, max_num_seqs=5, max_model_len=2048) as llm:
        results = llm.generate(many, SAMPLING)
        logits = llm.logits(many[:3])
    for ids, got in zip(many, logits):
        with torch.no_grad():
            want = reference(torch.tensor([ids])).logits[0]
        assert (torch.as_tensor(got) - want).abs().max() <= 1e-5 * want.abs().max()
    for ids, result in zip(many, results):
        asked = torch.tensor([ids])
        want = reference.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=TOKENS, do_sample=False)[
            0, len(ids) :
        ].tolist()
        text = tokenizer.decode(want, skip_special_tokens=True)
        assert tokenizer.decode(result.token_ids, skip_special_tokens=True) == text, tokenizer.decode(ids)
        assert len(text) > 0
