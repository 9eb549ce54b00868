"""`Request`: one sequence while it lives in the engine, and the result that it leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from inferplane.engine.request.constraint import Constraint
from inferplane.engine.request.history import History
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.results import Delta, FinishReason, Result, Timings, TokenLogprob
from inferplane.engine.request.seeds import as_int64, fresh_seed
from inferplane.engine.request.text import Detokenizer, Part
from inferplane.errors import GenerationError, InferplaneError, place_of, sentence, warn
from inferplane.types.state import StateSlots

if TYPE_CHECKING:
    import torch

SEE_EXPLAIN = "see `inferplane explain FOLDER --device D` for the kernels in use, and pin another provider"


@dataclass(eq=False, slots=True)
class BlockTable:
    """A sequence's blocks in one block table.

    Args:
        blocks: block numbers, in the order of its tokens.
        released: how many of the first ones were released because the window of every layer that reads the table has
            passed them; they stand as 0.
    """

    blocks: list[int]
    released: int = 0

    @property
    def held(self) -> list[int]:
        """The blocks that are not released."""
        return self.blocks[self.released :]


@dataclass(eq=False)
class Request:
    """One sequence. The scheduler owns the fields from `max_chunk_tokens` on; the engine appends to `generated`.

    Args:
        request_id: unique among live requests.
        prompt: token ids.
        params: how to sample.
        end_ids: tokens that end the sequence.
        text: decodes the generated tokens, except those that end the text; None when no text is needed.
        constraint: what its text may go on with, and the count of its thought; None: unconstrained.
        seed: of its random numbers; the i-th token's depends on the seed and i alone. None: a fresh one.
        priority: lower runs first.
        tenant: cached entries are shared within a tenant only; the tenant that runs least comes first at equal
            priority.
        deadline: monotonic time in seconds at which it ends with "timeout"; None: never.
        generated: tokens so far.
        pending: tokens that steps in flight choose, and the host does not know yet: 0 to 2, a step.
        max_chunk_tokens: the largest number of its known tokens that a step computes.
        tables: its block tables; none while it has no blocks.
        state: the slots of its states; None while it has none.
        stops: numbers of its tokens at which a step has to end, so that the states there can be found later.
        computed: tokens whose KV entries are in the cache.
        recomputed: known tokens that the next steps compute once more, since drafts behind them were refused and its
            states went past them.
        hashes: hashes of its full blocks, as far as they were needed.
        drafts: tokens to verify in the next step.
        pooled: the hidden states of its prompt, pooled so far: float32 `[D]` on the host.
        finish_reason: None while it lives.
        error: why it failed, if it did; `error_place`: " at FILE:LINE" of the plugin's code that raised, else empty.
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
    pending: int = 0
    max_chunk_tokens: int = 1
    tables: list[BlockTable] = field(default_factory=list)
    state: StateSlots | None = None
    stops: tuple[int, ...] = ()
    computed: int = 0
    recomputed: int = 0
    hashes: list[bytes] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    pooled: torch.Tensor | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str = ""
    error_place: str = ""
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
            self.seed = fresh_seed() if own is None else as_int64(own)
        if self.params.timeout_s is not None and self.deadline is None:
            self.deadline = self.arrived + self.params.timeout_s
        self._is_plain_greedy = self.params.is_plain_greedy and self.params.prompt_logprobs is None
        self.history = History(self.prompt) if self.params.penalizes else None
        self.logprobs: list[TokenLogprob] | None = None if self.params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if self.params.prompt_logprobs is None else [None]

    @property
    def next_is_argmax(self) -> bool:
        """Whether its next token is the argmax of the model's own logits, and nothing else is returned with it."""
        is_free = self.constraint is None or self.constraint.is_free(1)
        return self._is_plain_greedy and is_free and self.num_chosen >= self.params.min_tokens

    @property
    def needs_newest_token(self) -> bool:
        """Whether the host has to know its newest token before it can say how the next one is chosen."""
        is_free = self.constraint is None or self.constraint.is_free(2)
        return self.history is not None or not is_free

    @property
    def needs_every_row(self) -> bool:
        """Whether every token of its prompt has to be computed, so that none may be taken from the prefix cache."""
        return self.params.prompt_logprobs is not None or self.params.pooling == "mean"

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of its thought so far."""
        return 0 if self.constraint is None else self.constraint.reasoning_tokens

    @property
    def embedding(self) -> list[float] | None:
        """Its prompt's pooled hidden state; None without `params.pooling`, and until it has ended with success."""
        if self.pooled is None or self.finish_reason not in ("stop", "length"):
            return None
        return list(self.pooled.tolist())

    @property
    def blocks(self) -> list[int]:
        """Its blocks in the first table, which drafting layers and draft models read too; empty while it has none."""
        return self.tables[0].blocks if self.tables else []

    @property
    def num_chosen(self) -> int:
        """Number of generated tokens so far, with those that a step in flight chooses."""
        return len(self.generated) + self.pending

    @property
    def is_complete(self) -> bool:
        """Whether it has all its tokens with those that a step in flight chooses, and so needs no further step."""
        return self.pending > 0 and self.num_chosen >= self.params.max_tokens

    @property
    def tokens(self) -> int:
        """Number of prompt and generated tokens so far, with those that a step in flight chooses."""
        return len(self.prompt) + len(self.generated) + self.pending

    @property
    def remaining(self) -> int:
        """Known tokens whose entries are not in the cache yet; 1 while it decodes, unless drafts were refused."""
        return self.tokens - self.computed

    @property
    def is_decoding(self) -> bool:
        """Whether its next step computes its newest token, and no others but those that it computes once more."""
        return self.remaining <= 1 + self.recomputed

    @property
    def max_cached_tokens(self) -> int:
        """The maximum number of its tokens in the cache; the last generated token is never written."""
        return len(self.prompt) + self.params.max_tokens - 1

    def slice(self, start: int, stop: int) -> Sequence[int]:
        """Token ids `start` to `stop` (without) of the sequence: its prompt, then its generated tokens."""
        n = len(self.prompt)
        return self.prompt[start:stop] + self.generated[max(0, start - n) : max(0, stop - n)]

    def push_text(self, token: int) -> bool:
        """Append a new token to the text, unless it ends the text and is not visible; returns whether the sequence ends
        with it. Its constraint has accepted the token.
        """
        ended = token in self.end_ids or (self.constraint is not None and self.constraint.ended)
        if self.text is not None and (not ended or token in self.text.visible):
            ended = self.text.push([token], self._part_of_newest()) or ended
        return ended

    def _part_of_newest(self) -> Part:
        """What of the text the newest token belongs to; its constraint has accepted it."""
        if self.constraint is None:
            return "answer"
        if self.constraint.can_begin_thought:
            return "begin"
        return "thought" if len(self.generated) <= self.constraint.reasoning_tokens else "answer"

    def record_error(self, error: Exception) -> str:
        """Keep the place where a plugin raised the exception; returns the exception in words."""
        self.error_place = place_of(error)
        return str(error) if isinstance(error, InferplaneError) else f"{type(error).__name__}: {error}"

    def timings(self) -> Timings:
        """Seconds and counts so far; final once the request has ended. What has not happened yet counts as happening
        now.
        """
        end = self.ended or time.monotonic()
        return Timings(
            queue_s=(self.started or end) - self.arrived,
            first_token_s=(self.first_token or end) - self.arrived,
            total_s=end - self.arrived,
            prompt_tokens=len(self.prompt),
            generated_tokens=len(self.generated),
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            reasoning_tokens=self.reasoning_tokens,
        )

    def result(self) -> Result:
        """The record that `LLM.generate` returns for this sequence. It also decodes the text that was held back, so
        call it only after the request has ended.
        """
        if self.text is not None:
            self.text.take(end=True)
        return Result(
            self.text.text if self.text is not None else "",
            self.generated,
            self.finish_reason or "abort",
            self.timings(),
            self.prompt,
            self.error + self.error_place,
            self.logprobs,
            self.prompt_logprobs,
            embedding=self.embedding,
        )


@dataclass
class PieceReader:
    """Reads what a request has generated, piece by piece; `sent` counts the tokens of the pieces so far."""

    request: Request
    sent: int = field(default=0, init=False)

    def next_piece(self) -> Delta | None:
        """The text, tokens and log-probabilities since the last piece; None if there are none and the request goes on.
        If the request has ended, this is its last piece.
        """
        request, sent = self.request, self.sent
        reason, new = request.finish_reason, request.generated[sent:]
        if reason is None and not new:
            return None
        logprobs = None if request.logprobs is None else request.logprobs[sent:]
        prompt = request.prompt_logprobs if sent == 0 else None
        self.sent += len(new)
        text = request.text.take(end=reason is not None) if request.text is not None else ""
        timings = request.timings() if reason is not None else None
        error, place, thought = request.error, request.error_place, request.reasoning_tokens
        return Delta(text, new, reason, timings, error, logprobs, prompt, request.embedding, place, thought)


def report_failures(requests: list[Request]) -> None:
    """Look at requests that have ended: raise GenerationError if all of them failed, warn if some did, else do nothing.
    Results carry the reason of each.
    """
    failed = [r for r in requests if r.finish_reason == "error"]
    if not failed:
        return
    error = failure_of(
        f"{len(failed)} of {len(requests)} requests failed while they ran", failed[0].error, failed[0].error_place
    )
    if len(failed) == len(requests):
        raise error
    warn(error.what)


def failure_of(what: str, error: str, place: str) -> GenerationError:
    """The exception for requests that failed while they ran.

    Args:
        what: the first words.
        error: what failed; if it says what to do, that is all there is to do.
        place: of the plugin's code; see `Request.record_error`.
    """
    remedy = "" if "To do: " in error else SEE_EXPLAIN
    return GenerationError(sentence(f"{what}: {error}{place}"), remedy=remedy)


def result_of(samples: list[Request]) -> Result:
    """The result of one prompt from its n sequences: that of the first, with all n in `samples` if n is above 1."""
    results = tuple(request.result() for request in samples)
    return results[0] if len(results) == 1 else replace(results[0], samples=results)
