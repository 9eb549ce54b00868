"""Drafts from the text itself: what followed the last tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.engine.speculate.config import SpeculativeConfig
from inferplane.engine.speculate.proposer import Proposer, Ran


class NgramProposer(Proposer):
    """Drafts copied from the prompt or from what was generated; host code only."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.longest = config.speculate_max_ngram_size

    def propose(self, ran: Sequence[Ran], wants: Sequence[int], hidden: torch.Tensor) -> list[list[int]]:
        """See `Proposer.propose`."""
        return [
            ngram_drafts(r.request.prompt, r.request.generated, n, self.longest) if n else []
            for r, n in zip(ran, wants)
        ]


def ngram_drafts(prompt: Sequence[int], generated: Sequence[int], most_drafts: int, longest_key: int) -> list[int]:
    """Up to `most_drafts` tokens that followed an earlier occurrence of the last generated tokens.

    Keys are the last n generated tokens, the longest first. For each, the prompt is searched from its start, then the
    generated tokens; the first place with something behind it wins.

    Args:
        prompt: token ids.
        generated: token ids generated so far.
        most_drafts: most tokens to return.
        longest_key: longest key in tokens.

    Returns:
        Draft token ids, possibly none.

    Source: LLMA, arXiv 2304.10887; prompt lookup decoding.
    """
    for n in range(min(longest_key, len(generated)), 0, -1):
        key = list(generated[-n:])
        for text, end in ((prompt, len(prompt)), (generated, len(generated) - 1)):
            start = _find(text, key, end)
            if start is not None:
                return list(text[start + n : start + n + most_drafts])
    return []


def _find(text: Sequence[int], key: list[int], end: int) -> int | None:
    """First place where `key` stands with at least one token behind it before `end` tokens are over."""
    n, first = len(key), key[0]
    start = 0
    limit = min(end, len(text) - 1) - n
    items = text if isinstance(text, list) else list(text)
    while start <= limit:
        try:
            start = items.index(first, start, limit + 1)
        except ValueError:
            return None
        if items[start : start + n] == key:
            return start
        start += 1
    return None
