"""Makes texts with a number of tokens, and counts the tokens of texts: by a tokenizer, or by rules without one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

CHARACTERS_PER_TOKEN = 4
"""What a text is counted by without a tokenizer: English has about so many in the vocabularies of today's models."""
_FREQUENT = """
the of and to in is that for it was on are as with they at be this from have or by one had not but what all
were when we there can an your which their said if do will each about how up out them then many some so
these would other into has more two like see time could no make than first been its who now people my
made over did down only way find use may water long little very after words called just where most know get
through back much before go good new write our used me man too any day same right look think also around
another came come work three word must because does part even place well such here take why things help put
years different away again off went old number great tell men say small every found still between name should
home big give air line set own under read last never us left end along while might next sound below saw both
"""
WORDS = tuple(_FREQUENT.split())
"""Frequent words, of which each is one token, with the space before it, in the vocabularies of today's models."""
Encode = Callable[[str], list[int]]


class TextSource:
    """Texts of random words.

    Args:
        source: random numbers.
        tokenizer: a folder with a tokenizer, which makes lengths exact; None: a word counts as a token.
    """

    def __init__(self, source: random.Random, tokenizer: Path | None) -> None:
        self.source = source
        self.is_exact = tokenizer is not None
        if tokenizer is not None:
            from inferplane.engine.request.text import Tokenizer

            self._tokenizer = Tokenizer(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens; needs a tokenizer."""
        return self._tokenizer.encode(text, special=False)

    def count(self, text: str) -> int:
        """Return how many tokens a text has, at least 1; without a tokenizer one for each four characters."""
        if self.is_exact:
            return max(1, len(self.encode(text)))
        return max(1, -(-len(text) // CHARACTERS_PER_TOKEN))

    def make(self, num_tokens: int) -> str:
        """Return a text of so many tokens; of one or two more or fewer, where the tokenizer has no exact one."""
        words = self.source.choices(WORDS, k=num_tokens)
        if not self.is_exact:
            return " ".join(words)
        low, high = 1, num_tokens  # words; as many as fit
        while low < high:
            middle = (low + high + 1) // 2
            if len(self.encode(" ".join(words[:middle]))) <= num_tokens:
                low = middle
            else:
                high = middle - 1
        text = " ".join(words[:low])
        while len(self.encode(f"{text} a")) <= num_tokens:
            text += " a"
        return text
