"""A model's tokens for llguidance, such that forced text never becomes an added token.

Where a constraint leaves one continuation only, llguidance tokenizes that text, and allows its first token. A tokenizer
of Hugging Face finds added tokens in text (`<think>`, `<|im_end|>`), but llguidance refuses those as text: it takes
tokens of that form for special ones. So text is tokenized here without added tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

PREFIX = "\x02"
"""Before a text, it takes the place in which some tokenizers put a space."""


class TextTokens:
    """The tokens of a model, in the form that `LLTokenizer` takes.

    Args:
        base: llguidance's tokenizer of the same text.
        text: a tokenizer's JSON text.
        end_ids: tokens that end a text.

    Attributes:
        tokens: each token's bytes, by id.
        special_token_ids: ids that are no text.
        eos_token_id: one of the end tokens. bos_token_id: always None.
    """

    is_tokenizer_wrapper = True
    """By this attribute llguidance recognizes an object that tokenizes."""

    def __init__(self, base: Any, text: str, end_ids: Collection[int]) -> None:
        from tokenizers import Tokenizer

        self._base = base
        self._plain = Tokenizer.from_str(json.dumps({**json.loads(text), "added_tokens": []}))
        self._before = self._encode(PREFIX)
        self.tokens = [base.decode_bytes([i]) for i in range(base.vocab_size)]
        self.special_token_ids = [i for i in range(base.vocab_size) if base.is_special_token(i)]
        self._specials = frozenset(self.special_token_ids)
        self.eos_token_id, self.bos_token_id = min(end_ids), None

    def __call__(self, text: str | bytes) -> list[int]:
        """Return ids of text tokens whose bytes are those of a text: the tokenizer's own where there are such ids, else
        the longest tokens from left to right.
        """
        text = text.decode() if isinstance(text, bytes) else text
        for ids in (self._encode(text), self._encode(PREFIX + text)[len(self._before) :]):
            is_text = self._specials.isdisjoint(ids)
            if is_text and b"".join(self.tokens[i] for i in ids) == text.encode():
                return ids
        return list(self._base.greedy_tokenize(text))

    def _encode(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)
