"""Settings of a server's memory by the formulas of PaddleNLP's "static graph deployment" page: tokens of the cache as
BLOCK_BS, the largest batch, and BLOCK_RATIO.

Source: PaddleNLP, llm/server/docs/deploy_usage_tutorial.md, recommended memory parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inferplane.errors import UsageError

EXTRA_PROMPT_TOKENS = 128
"""Added to the average prompt in the formula of BLOCK_RATIO."""
MAX_BATCH = 128
"""Largest BATCH_SIZE of the source system."""


@dataclass(frozen=True)
class Traffic:
    """The average request of a service.

    Args:
        prompt_tokens: average tokens of a prompt, from 1.
        output_tokens: average tokens of an answer, from 1.

    Raises:
        UsageError: one of them is not above 0.
    """

    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} = {getattr(self, name)}.", there_is="numbers from 1")

    @property
    def tokens(self) -> int:
        """Of a request."""
        return self.prompt_tokens + self.output_tokens

    def block_ratio(self, extend_ratio: float = 1.0) -> float:
        """BLOCK_RATIO: the share of blocks for prompts, at most 1. `extend_ratio` is 1.1 to 1.3 where the lengths of
        prompts differ much."""
        return min(1.0, (self.prompt_tokens + EXTRA_PROMPT_TOKENS) / self.tokens * extend_ratio)


def count_cache_tokens(block_bs: int, max_seq_len: int) -> int:
    """Tokens of a cache of BLOCK_BS sequences of the longest length."""
    return block_bs * max_seq_len


@dataclass(frozen=True)
class Sizing:
    """The settings that a cache allows.

    Args:
        cache_tokens: tokens that the cache holds.
        max_seq_len: tokens of the longest sequence, prompt and answer.
        traffic: the average request; None: it is not known.
    """

    cache_tokens: int
    max_seq_len: int
    traffic: Traffic | None = None

    @property
    def block_bs(self) -> int:
        """BLOCK_BS: how many of the longest sequences the cache holds."""
        return self.cache_tokens // self.max_seq_len

    @property
    def max_batch(self) -> int | None:
        """BATCH_SIZE: how many average requests the cache holds, at most `MAX_BATCH`; None without traffic."""
        return None if self.traffic is None else min(MAX_BATCH, self.cache_tokens // self.traffic.tokens)

    def data(self) -> dict[str, Any]:
        """As JSON-ready data."""
        ratio = None if self.traffic is None else round(self.traffic.block_ratio(), 2)
        found = {"cache_tokens": self.cache_tokens, "block_bs": self.block_bs}
        return {**found, "max_batch": self.max_batch, "block_ratio": ratio}
