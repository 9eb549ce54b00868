"""From a generation's pieces to an answer: what all wire formats have in common."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from inferplane.engine import Delta
from inferplane.serving.errors import ApiError
from inferplane.serving.generation import Generation, Piece

if TYPE_CHECKING:
    from inferplane.engine.request.results import TokenLogprob
    from inferplane.serving.model import ServedModel
    from inferplane.serving.wire import SamplingFields

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
SSE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Rendering:
    """One wire format's answer to one request, as bytes or JSON-ready data, independent of the transport.

    What a format does not override is as in OpenAI's formats.
    """

    media_type = SSE
    """The media type of a stream."""
    ping = b": ping\n\n"
    """Keeps the connection of a silent stream alive; empty if the format has nothing for that."""

    def opening(self, generation: Generation) -> bytes:
        """Return the bytes that begin a stream."""
        return b""

    def piece(self, generation: Generation, piece: Piece) -> bytes:
        """Return a piece of a stream; may be empty."""
        return b""

    def closing(self, generation: Generation) -> bytes:
        """Return the last bytes of a stream that succeeded."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """Return the last bytes of a stream that failed."""
        return encode_event(error.body())

    def full_response(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> Mapping[str, Any]:
        """Return the answer without a stream."""
        raise NotImplementedError

    def encode_answer(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> tuple[bytes, dict[str, str]]:
        """Return the answer without a stream as bytes, and its headers."""
        return encode_json(self.full_response(generation, choices)), {"content-type": "application/json"}

    def error_body(self, error: ApiError) -> Mapping[str, Any]:
        """Return the body of an error."""
        return error.body()


@dataclass
class GeneratedChoice:
    """The whole output of one sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    embedding: list[float] | None = None

    def add(self, delta: Delta) -> None:
        """Append a piece."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.embedding = self.embedding or delta.embedding

    def delta(self) -> Delta:
        """Return the whole output as one piece."""
        reason: Any = self.finish_reason
        return Delta(self.text, self.token_ids, reason, logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs)


def encode_json(data: Any) -> bytes:
    """Return JSON without spaces, in UTF-8."""
    return _encode(data)


def encode_event(data: Any) -> bytes:
    """Return a server-sent event with JSON."""
    return b"data: " + encode_json(data) + b"\n\n"


async def gather_choices(generation: Generation) -> list[GeneratedChoice]:
    """Read a generation to its end.

    Raises:
        ApiError: a sequence failed.
    """
    choices = [GeneratedChoice() for _ in range(generation.num_choices)]
    async for piece in generation.pieces():
        choices[piece.choice].add(piece.delta)
    return choices


class Frames:
    """Encodes pieces of a stream that, per choice, differ only in one text: the rest is encoded once."""

    def __init__(self) -> None:
        self._parts: dict[Hashable, list[bytes]] = {}

    def encode(self, kind: Hashable, text: str, encode_piece: Callable[[str], bytes]) -> bytes:
        """Return what `encode_piece` returns for a text; it is called once per kind of piece, as a choice's number."""
        found = self._parts.get(kind)
        if found is None:
            found = self._parts[kind] = encode_piece("\0").split(_encode("\0"))
            assert len(found) > 1
        return _encode(text).join(found)


class OpenAIRendering(Rendering):
    """What the answers of OpenAI's formats for generated text have in common.

    Args:
        request: the request.
        model: spells tokens.
        name: the model's name for the client.
        answer_id: the answer's id.
        kind: `object` of a stream's chunks.
    """

    def __init__(self, request: SamplingFields, model: ServedModel, name: str, answer_id: str, kind: str) -> None:
        self._model, self._includes_usage = model, request.includes_usage
        self._includes_usage_so_far = request.includes_usage_so_far
        self._tokens: dict[int, int] = {}  # choice -> tokens so far
        self._usage_so_far: dict[str, int] | None = None
        self._head = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": model.fingerprint,
        }
        self._frames = Frames()

    def chunk(self, choice: Mapping[str, Any]) -> bytes:
        """Return one choice's part of a stream."""
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._includes_usage:
            chunk["usage"] = self._usage_so_far
        return encode_event(chunk)

    def count_so_far(self, generation: Generation, choice: int, num_tokens: int = 0) -> None:
        """Add the tokens of a piece to its choice, whose next chunks show the sum if the request asks for it."""
        if self._includes_usage_so_far:
            prompt = len(generation.prompts[choice // generation.call.n])
            so_far = self._tokens[choice] = self._tokens.get(choice, 0) + num_tokens
            tokens = {"prompt_tokens": prompt, "completion_tokens": so_far, "total_tokens": prompt + so_far}
            self._usage_so_far = tokens

    def closing(self, generation: Generation) -> bytes:
        if not self._includes_usage:
            return DONE
        return encode_event({**self._head, "choices": [], "usage": self.usage(generation)}) + DONE

    def usage(self, generation: Generation) -> dict[str, Any]:
        """Return the numbers of tokens in and out, as OpenAI counts them."""
        return {
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": generation.completion_tokens,
            "total_tokens": generation.prompt_tokens + generation.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        }


def finite_logprob(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


def top_with_own(token: TokenLogprob) -> Iterable[tuple[int, float]]:
    """Return the most likely alternatives, and the token itself if it is not among them."""
    own = () if any(i == token.token_id for i, _ in token.top) else ((token.token_id, token.logprob),)
    return (*token.top, *own)
