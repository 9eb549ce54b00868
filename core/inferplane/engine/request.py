"""A request while it lives, and what it leaves behind."""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass, field
from typing import Literal

from inferplane.engine.params import SamplingParams
from inferplane.engine.text import Detokenizer

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Timings:
    """How long a request took, in seconds on a monotonic clock.

    Args:
        queue_s: from arrival to its first step.
        first_token_s: from arrival to its first token.
        total_s: from arrival to its end.
        prompt_tokens: tokens of the prompt.
        generated_tokens: tokens generated.
    """

    queue_s: float
    first_token_s: float
    total_s: float
    prompt_tokens: int
    generated_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second after the first one; 0 for fewer than two."""
        span = self.total_s - self.first_token_s
        return (self.generated_tokens - 1) / span if self.generated_tokens > 1 and span > 0 else 0.0


@dataclass(frozen=True)
class Result:
    """What `generate` returns for one prompt.

    Args:
        text: generated text, without the prompt and without a stop string.
        token_ids: generated tokens, end-of-text included if it was generated.
        finish_reason: "stop", "length" or "abort".
        timings: seconds and tokens.
        prompt_token_ids: the prompt as the model saw it.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    timings: Timings
    prompt_token_ids: list[int]


@dataclass(frozen=True)
class Delta:
    """What `stream` yields: new text (possibly empty), its tokens, and at the end why it ended."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    timings: Timings | None = None


@dataclass(eq=False)
class Request:
    """One sequence. The scheduler owns `blocks` and `computed`; the engine appends to `generated`.

    Args:
        request_id: unique among live requests.
        prompt: token ids.
        params: how to sample.
        end_ids: tokens that end it.
        text: takes in the generated tokens, except those that end the text; None when nobody wants text.
        generated: tokens so far.
        blocks: its KV blocks.
        computed: tokens whose KV entries are in the cache.
        finish_reason: None while it runs.
    """

    request_id: int
    prompt: list[int]
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()
    text: Detokenizer | None = None
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    finish_reason: FinishReason | None = None
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None

    def __post_init__(self) -> None:
        seed = self.params.seed
        self._random = random.Random(secrets.randbits(64) if seed is None else seed)
        self._drawn: list[float] = []

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt) + len(self.generated)

    @property
    def most_tokens(self) -> int:
        """Tokens it can ever have in the cache; the last generated one is never written."""
        return len(self.prompt) + self.params.max_tokens - 1

    def slice(self, start: int, stop: int) -> list[int]:
        """Token ids `start:stop` of prompt and generated tokens together."""
        n = len(self.prompt)
        return self.prompt[start:stop] + self.generated[max(0, start - n) : max(0, stop - n)]

    def uniform(self) -> float:
        """The random number in [0, 1) that decides the next token: a function of the seed and of the token's place.

        It has 24 bits, so that float32 holds it exactly and never rounds it up to 1.
        """
        place = len(self.generated)
        while len(self._drawn) <= place:
            self._drawn.append(self._random.getrandbits(24) / 2**24)
        return self._drawn[place]

    def timings(self) -> Timings:
        """Seconds so far; call it when the request has ended."""
        end = self.ended or time.monotonic()
        return Timings(
            queue_s=(self.started or end) - self.arrived,
            first_token_s=(self.first_token or end) - self.arrived,
            total_s=end - self.arrived,
            prompt_tokens=len(self.prompt),
            generated_tokens=len(self.generated),
        )
