"""From a job's pieces to an answer: what every wire format does in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from inferplane.engine import Delta
from inferplane.serving.errors import ApiError
from inferplane.serving.generation import Generation, Piece

if TYPE_CHECKING:
    from inferplane.engine.results import TokenLogprob

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON does not have."""
SSE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Rendering(Protocol):
    """One wire format's answer to one request. It knows of no transport: its parts are bytes or JSON-ready data."""

    media_type: str
    """Of a stream."""
    ping: bytes
    """What keeps a silent stream's connection alive; empty where the format has nothing for that."""

    def opening(self, generation: Generation) -> bytes:
        """What a stream begins with."""

    def piece(self, generation: Generation, piece: Piece) -> bytes:
        """A piece of a stream; may be empty."""

    def closing(self, generation: Generation) -> bytes:
        """What a stream that came to its end ends with."""

    def failure(self, error: ApiError) -> bytes:
        """The last words of a stream that did not."""

    def whole(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> Mapping[str, Any]:
        """The answer without a stream."""

    def refusal(self, error: ApiError) -> Mapping[str, Any]:
        """The body of an error."""


@dataclass
class GeneratedChoice:
    """One sequence, gathered."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    embedding: list[float] | None = None

    def add(self, delta: Delta) -> None:
        """Take in a piece."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.embedding = self.embedding or delta.embedding

    def delta(self) -> Delta:
        """All of it as one piece."""
        reason: Any = self.finish_reason
        return Delta(self.text, self.token_ids, reason, logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs)


def compact(data: Any) -> bytes:
    """JSON without spaces, in UTF-8."""
    return _encode(data)


def event(data: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + compact(data) + b"\n\n"


class Frame:
    """A piece of a stream that differs from its neighbours in one text alone: the rest is encoded once.

    Args:
        make: encodes the whole piece with a text.
    """

    def __init__(self, make: Callable[[str], bytes]) -> None:
        self._before, mark, self._after = make("\0").partition(_encode("\0"))
        assert mark

    def __call__(self, text: str) -> bytes:
        """The piece with this text."""
        return self._before + _encode(text) + self._after


def usage(generation: Generation) -> dict[str, Any]:
    """Tokens in and out, as OpenAI counts them."""
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
        "total_tokens": generation.prompt_tokens + generation.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def with_own(token: TokenLogprob) -> Iterable[tuple[int, float]]:
    """The likeliest alternatives, and the token itself if it is none of them."""
    own = () if any(i == token.token_id for i, _ in token.top) else ((token.token_id, token.logprob),)
    return (*token.top, *own)
