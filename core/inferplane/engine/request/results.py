"""What a request returns to its caller: plain data, without torch, which a caller's process may never import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """One token as the model saw it.

    Args:
        token_id: the token.
        logprob: natural logarithm of its probability.
        rank: 1 for the most probable; 1 + the number of tokens with a larger logit.
        top: the most probable tokens with their log-probabilities, the most probable first, the lower id first among
            equals.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Timings:
    """How long a request took, in seconds on a monotonic clock.

    Args:
        queue_s: from arrival to its first step.
        first_token_s: from arrival to its first token.
        total_s: from arrival to its end.
        prompt_tokens: tokens of the prompt.
        generated_tokens: tokens generated.
        cached_tokens: prompt tokens whose entries were found in the cache.
        preemptions: how often its blocks were released and computed again.
        reasoning_tokens: generated tokens of the thought, with the marks around it, if `reasoning` is given.
    """

    queue_s: float
    first_token_s: float
    total_s: float
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0
    reasoning_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second after the first one; 0 for fewer than two."""
        span = self.total_s - self.first_token_s
        return (self.generated_tokens - 1) / span if self.generated_tokens > 1 and span > 0 else 0.0


@dataclass(frozen=True)
class Result:
    """What `generate` returns for one prompt.

    Args:
        text: generated text, without the prompt and without a stop string.
        token_ids: generated tokens, end-of-text included if it was generated.
        finish_reason: "stop", "length", "abort", "timeout" or "error".
        timings: seconds and tokens.
        prompt_token_ids: the prompt as the model saw it.
        error: what went wrong, with finish reason "error".
        logprobs: of the generated tokens, if requested.
        prompt_logprobs: of the prompt's tokens, if requested; the first token has none.
        samples: with `n` above 1 all n results, this one first.
        embedding: the prompt's pooled hidden state, if `pooling` requests it.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    timings: Timings
    prompt_token_ids: list[int]
    error: str = ""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    samples: tuple[Result, ...] = ()
    embedding: list[float] | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens of the thought, with the marks around it, if `SamplingParams.reasoning` is given."""
        return self.timings.reasoning_tokens


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a stream: new text (possibly empty), its tokens, and at the end why it ended.

    The last delta alone has a `finish_reason`. If requested, `prompt_logprobs` come with the first one and the
    embedding with the last one. `reasoning_tokens` counts the thought's tokens so far, with the marks around it.

    A stream has about one per token, and each is sent between processes unchanged. `error` may be shown to clients;
    `error_place`, " at FILE:LINE" of the plugin's code that raised it, is for those who run the model.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    timings: Timings | None = None
    error: str = ""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    embedding: list[float] | None = None
    error_place: str = ""
    reasoning_tokens: int = 0
