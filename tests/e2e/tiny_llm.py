"""A tiny random model with a tokenizer, opened as `LLM`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferplane import LLM, Result, SamplingParams
from tests.e2e.tiny_models import llama_config, random_model
from tests.e2e.tiny_tokenizers import CHAT, byte_level, save

LONG = "The quick brown fox jumps over the lazy dog. " * 2
GREEDY = SamplingParams(max_tokens=24, temperature=0)


def write(folder: Path, tokenizer: Callable[[], Any] | None = byte_level, **options: Any) -> Path:
    """A model with a tokenizer of its size."""
    vocab = save(tokenizer(), folder, chat_template=options.pop("chat_template", CHAT)) if tokenizer else 400
    random_model(llama_config(vocab_size=vocab, **options), seed=3).save_pretrained(folder)
    return folder


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", **{"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, **options})


def one(llm: LLM, prompt: Any = "Hello", **options: Any) -> Result:
    return llm.generate(prompt, SamplingParams(**{"max_tokens": 24, "temperature": 0, **options}))[0]
