"""Drafts from the text itself: the tokens that followed the last tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.engine.schedule.scheduler import ScheduledChunk
from inferplane.engine.speculate.proposer import Proposer, ProposerContext, VerifiedChunk


class NgramProposer(Proposer):
    """Copies drafts from the prompt or the generated tokens, on the host.

    Args:
        context: its config's `prompt_lookup_max` is the longest key.
    """

    def __init__(self, context: ProposerContext) -> None:
        self.max_key = context.config.prompt_lookup_max

    def needs_step(self, chunks: Sequence[ScheduledChunk], max_drafts: Sequence[int]) -> bool:
        """See `Proposer.needs_step`: it reads tokens alone."""
        return False

    def propose(
        self, chunks: Sequence[VerifiedChunk], max_drafts: Sequence[int], hidden: torch.Tensor
    ) -> list[list[int]]:
        """See `Proposer.propose`; `hidden` is not read."""
        return [
            ngram_drafts(c.request.prompt, c.request.generated, n, self.max_key) if n else []
            for c, n in zip(chunks, max_drafts)
        ]


def ngram_drafts(prompt: Sequence[int], generated: Sequence[int], max_drafts: int, max_key: int) -> list[int]:
    """Up to `max_drafts` tokens that followed an earlier occurrence of the last generated tokens.

    Keys are the last n generated tokens, the longest first. For each, the prompt is searched from its start, then the
    generated tokens; the first occurrence with a token after it wins.

    Args:
        prompt: token ids.
        generated: token ids generated so far.
        max_drafts: maximum number of tokens to return.
        max_key: longest key in tokens.

    Returns:
        Draft token ids, possibly none.

    Source: LLMA, arXiv 2304.10887; prompt lookup decoding.
    """
    for n in range(min(max_key, len(generated)), 0, -1):
        key = list(generated[-n:])
        for text, end in ((prompt, len(prompt)), (generated, len(generated) - 1)):
            start = _find(text, key, end)
            if start is not None:
                return list(text[start + n : start + n + max_drafts])
    return []


def _find(text: Sequence[int], key: list[int], end: int) -> int | None:
    """The first index of `key` in the first `end` tokens of `text` that has at least one token after it."""
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
