"""A request while it lives, and what it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.results import FinishReason, Timings, TokenLogprob
from inferplane.engine.request.text import Detokenizer
from inferplane.engine.sampling import rng
from inferplane.engine.sampling.batch_rows import History, takes_likeliest
from inferplane.engine.sampling.grammars import Constraint

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Request:
    """One sequence. The scheduler owns the fields from `blocks` on; the engine appends to `generated`.

    Args:
        request_id: unique among live requests.
        prompt: token ids.
        params: how to sample.
        end_ids: tokens that end it.
        text: takes in the generated tokens, except those that end the text; None when nobody wants text.
        constraint: what its text must obey (`inferplane.engine.sampling.grammars`); None: nothing.
        seed: of its random numbers; the i-th token's depends on the seed and i alone. None: a fresh one.
        priority: lower runs first.
        tenant: cached entries are shared within a tenant only, and tenants of equal priority take turns.
        deadline: monotonic time in seconds at which it ends with "timeout"; None: never.
        generated: tokens so far.
        blocks: its KV blocks.
        gone_blocks: how many of its first blocks were given back, since no layer looks there again; they stand as 0.
        computed: tokens whose KV entries are in the cache.
        hashes: of its full blocks, as far as they were needed.
        drafts: tokens to verify in the next step.
        pooled: what `pooling` has gathered of its prompt so far, float32 `[D]` on the host.
        finish_reason: None while it lives.
    """

    request_id: int | str
    prompt: list[int]
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()
    text: Detokenizer | None = None
    constraint: Constraint | None = None
    seed: int | None = None
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    gone_blocks: int = 0
    computed: int = 0
    hashes: list[bytes] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    pooled: torch.Tensor | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str = ""
    failure: Exception | None = None
    arrival: int = 0
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None

    def __post_init__(self) -> None:
        if self.seed is None:
            own = self.params.seed
            self.seed = rng.fresh_seed() if own is None else rng.as_int64(own)
        if self.params.timeout_s is not None and self.deadline is None:
            self.deadline = self.arrived + self.params.timeout_s
        self.likeliest = takes_likeliest(self.params) and self.params.prompt_logprobs is None
        self.history = History(self.prompt) if self.params.penalizes else None
        self.logprobs: list[TokenLogprob] | None = None if self.params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if self.params.prompt_logprobs is None else [None]

    @property
    def likeliest_next(self) -> bool:
        """Whether its next token is the likeliest of the logits as they are, and nothing else is asked for."""
        return self.likeliest and self.constraint is None and len(self.generated) >= self.params.min_tokens

    @property
    def needs_every_row(self) -> bool:
        """Whether every row of its prompt has to be computed for it: none may be taken from the prefix cache."""
        return self.params.prompt_logprobs is not None or self.params.pooling == "mean"

    @property
    def embedding(self) -> list[float] | None:
        """Its prompt's pooled hidden state; None where none was asked for, or until it has ended well."""
        if self.pooled is None or self.finish_reason not in ("stop", "length"):
            return None
        return list(self.pooled.tolist())

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt) + len(self.generated)

    @property
    def remaining(self) -> int:
        """Known tokens that are not in the cache yet; 1 while it decodes."""
        return self.tokens - self.computed

    @property
    def most_tokens(self) -> int:
        """Tokens it can ever have in the cache; the last generated one is never written."""
        return len(self.prompt) + self.params.max_tokens - 1

    def slice(self, start: int, stop: int) -> Sequence[int]:
        """Token ids `start:stop` of prompt and generated tokens together."""
        n = len(self.prompt)
        return self.prompt[start:stop] + self.generated[max(0, start - n) : max(0, stop - n)]

    def timings(self) -> Timings:
        """Seconds so far; final once the request has ended."""
        end = self.ended or time.monotonic()
        return Timings(
            queue_s=(self.started or end) - self.arrived,
            first_token_s=(self.first_token or end) - self.arrived,
            total_s=end - self.arrived,
            prompt_tokens=len(self.prompt),
            generated_tokens=len(self.generated),
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
        )
