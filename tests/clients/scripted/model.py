"""A plugin with a model that answers rightly: a Llama of one layer whose logits follow a table (answers.py).

It reads the whole sequence back through its block table, so that batches, chunks, cached prefixes and preempted
sequences are those of any model. It favours the next token of every text that the table has for the conversation; under
a constraint the most favoured text that the constraint allows goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from inferplane.models.parts import decoder_model, dense_mlp, grouped_query_attention
from inferplane.ops import CausalLM, Sample
from inferplane.plugin import hookimpl
from tests.clients.scripted.answers import list_texts
from tests.clients.scripted.tokens import END, texts

INFERPLANE_API = (1, 0)
LONGEST = 24
"""Bytes of the longest token that is tried."""
BEST, PER_TEXT, PER_SHORTER = 400.0, 15.0, 8.0
"""Logits: of the best token; how much less a further text, and a shorter token of the same text, has."""
CLOSING = {END: 90.0, '"': 80.0, "}": 70.0, "]": 60.0, ",": 50.0, ":": 40.0, "0": 30.0}
"""Logits where no text applies: what ends a constrained text soon."""
written: dict[int, int] = {}
"""Slot of the cache -> the token in it."""


@cache
def tokens_by_text() -> dict[bytes, int]:
    """Token ids by what they add to a text."""
    return {text: number for number, text in enumerate(texts()) if text}


@lru_cache(maxsize=4096)
def favoured(so_far: bytes) -> dict[int, float]:
    """Logits of tokens after a text; all others are 0."""
    known, out = tokens_by_text(), {}
    for rank, text in enumerate(list_texts(so_far)):
        beginnings = (text[:length] for length in range(min(len(text), LONGEST), 0, -1))
        for place, number in enumerate(known[beginning] for beginning in beginnings if beginning in known):
            logit = BEST - PER_TEXT * rank - PER_SHORTER * min(place, 1)
            out[number] = max(out.get(number, 0.0), logit)
    return out or {known[text.encode()]: logit for text, logit in CLOSING.items()}


class ScriptedModel(CausalLM, name="scripted_model"):
    """A causal language model whose logits follow the table, whatever its hidden states are.

    Args of the call:
        batch: the step. cache: changed.

    Returns:
        logits float32 `[R, V]` and hidden states `[T, D]`, as `CausalLM`.
    """

    def __call__(self, batch: Any, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = CausalLM.__call__(self, batch, cache)
        ids, size = batch.ids.tolist(), cache.block_tokens
        written.update(zip(batch.slots.tolist(), ids))
        requested = range(len(ids)) if batch.logit_rows is None else batch.logit_rows.tolist()
        place_of = {row: place for place, row in enumerate(requested)}
        logits.zero_()
        for row in batch.rows():
            blocks, first = row.table.tolist(), row.tokens - (row.stop - row.start)
            before = [texts()[written[blocks[i // size] * size + i % size]] for i in range(first)]
            so_far = b"".join(before)
            for token in range(row.start, row.stop):
                so_far += texts()[ids[token]]
                if token in place_of:
                    for number, logit in favoured(so_far).items():
                        logits[place_of[token], number] = logit
        return logits, hidden

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return []


def build(build: Any) -> CausalLM:
    """The tree of ops of a config."""
    plain = decoder_model(build, grouped_query_attention(build), dense_mlp(build))
    return ScriptedModel(**{name: getattr(plain, name) for name in plain.fields()})


@hookimpl
def inferplane_register_models(register: Any) -> None:
    """Register the architecture `ScriptedForCausalLM`."""
    register("ScriptedForCausalLM", build)
