"""Comparisons of a loaded model with transformers' at float32, as `tests/e2e/test_parity.py` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inferplane import LLM
from tests.e2e.mixtures import ragged
from tests.e2e.test_parity import FLOAT32, error
from tests.e2e.tiny_models import logits_of, prompts
from tests.families.cases import make


@contextmanager
def pair_of(family: str, case: str, folder: Path, **changes: Any) -> Iterator[tuple[Any, LLM]]:
    """transformers' model of a case with entries changed, and ours from its folder."""
    model = make(family, case, folder, **changes)
    with LLM(folder, device="cpu", dtype="float32", max_num_seqs=3, max_num_batched_tokens=48) as llm:
        assert not llm.runner.loaded.unused
        yield model, llm


def compare_prompts(model: Any, llm: LLM, lengths: tuple[int, ...], chunk_tokens: int) -> None:
    """Logits after every token of prompts that are computed in chunks."""
    many = prompts(llm.engine.vocab, lengths)
    for ids, got in zip(many, llm.logits(many, chunk_tokens=chunk_tokens)):
        assert error(got, logits_of(model, ids)) <= FLOAT32


def compare_ragged(model: Any, llm: LLM, lengths: tuple[int, ...]) -> None:
    """Sequences at different phases share steps and scattered blocks of a cache that was full of NaN."""
    many = prompts(llm.engine.vocab, lengths, seed=2)
    logits, kinds = ragged(llm.runner, many)
    assert {("decode", False, False), ("mixed", True, True)} <= kinds
    for ids, got in zip(many, logits):
        assert error(got, logits_of(model, ids)) <= FLOAT32
