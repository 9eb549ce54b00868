"""OpenAI's text completions: `POST /v1/completions`.

Source: https://platform.openai.com/docs/api-reference/completions.
"""

from __future__ import annotations

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from inferplane.serving.admission import GenerateCall
from inferplane.serving.constraints.fields import WORDS, Constrained
from inferplane.serving.errors import invalid
from inferplane.serving.generation import Generation, Piece
from inferplane.serving.rendering import GeneratedChoice, OpenAIRendering, finite_logprob, top_with_own
from inferplane.serving.wire import (
    MAX_TOKENS,
    Alternatives,
    GeneratedResponse,
    JsonObject,
    ManyTokenIds,
    Texts,
    TokenIds,
)

if TYPE_CHECKING:
    from inferplane.engine.request.results import TokenLogprob
    from inferplane.serving.model import ServedModel

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""

Text = Annotated[str, Field(min_length=1)]


class CompletionRequest(Constrained):
    """A text to be continued."""

    prompt: Text | Texts | TokenIds | ManyTokenIds
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    echo: bool | None = None
    logprobs: Alternatives | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: Literal[""] | None = Field(None, description="Insertion is not supported.")

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    def to_call(self) -> GenerateCall:
        """Return the call that the request makes."""
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise invalid("best_of other than n is not supported.", "best_of", "unsupported")
        constraint, ignored = self.constraint()
        sampling = {**self.sampling_fields(), **constraint}
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
            if self.echo:
                sampling["prompt_logprobs"] = self.logprobs
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if max_tokens == 0 and sampling.get("min_tokens"):
            raise invalid("min_tokens exceeds max_tokens = 0.", "min_tokens")
        # One token has to be generated so that the prompt runs; it is not shown.
        return GenerateCall(
            prompts=self.prompts(),
            sampling=sampling,
            max_tokens=max(max_tokens, 1),
            n=n,
            timeout_s=self.timeout,
            model=self.model or "",
            words=WORDS,
            ignored=ignored,
        )


class CompletionLogprobs(JsonObject):
    """Log-probabilities; each list has one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(JsonObject):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None


class CompletionResponse(GeneratedResponse):
    """The answer to a completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionRendering(OpenAIRendering):
    """The answer to one `CompletionRequest`.

    Args:
        request: the request.
        model: spells tokens.
        name: the model's name for the client.
        request_id: the answer's id.
    """

    def __init__(self, request: CompletionRequest, model: ServedModel, name: str, request_id: str) -> None:
        super().__init__(request, model, name, f"cmpl-{request_id}", "text_completion")
        self._request = request
        self._prompt_only = request.max_tokens == 0
        self._offsets: dict[int, tuple[int, IncrementalDecoder]] = {}
        differs = request.return_token_ids or request.includes_usage_so_far or self._prompt_only
        self._plain = request.logprobs is None and not differs

    def piece(self, generation: Generation, piece: Piece) -> bytes:
        delta, index = piece.delta, piece.choice
        self.count_so_far(generation, index, 0 if self._prompt_only else len(delta.token_ids))
        first = index not in self._offsets
        if self._plain and not first and delta.finish_reason is None:
            encode_piece = lambda text: self.chunk(self._choice(generation, index, GeneratedChoice(text), False))  # noqa: E731
            return self._frames.encode(index, delta.text, encode_piece) if delta.text else b""
        if not (delta.text or delta.finish_reason or delta.logprobs or first or self._request.return_token_ids):
            return b""
        choice = GeneratedChoice()
        choice.add(delta)
        return self.chunk(self._choice(generation, index, choice, first))

    def full_response(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> dict[str, Any]:
        found = [self._choice(generation, i, choice, True) for i, choice in enumerate(choices)]
        return {**self._head, "choices": found, "usage": self.usage(generation)}

    def usage(self, generation: Generation) -> dict[str, Any]:
        usage = super().usage(generation)
        if self._prompt_only:
            usage.update(completion_tokens=0, total_tokens=generation.prompt_tokens)
        return usage

    def _choice(self, generation: Generation, index: int, choice: GeneratedChoice, first: bool) -> dict[str, Any]:
        echo = bool(self._request.echo) and first
        text = "" if self._prompt_only else choice.text
        if echo:
            text = self._prompt_text(generation, index) + text
        shown: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(generation, index, choice, echo),
            "finish_reason": "length" if self._prompt_only and choice.finish_reason else choice.finish_reason,
        }
        if self._request.return_token_ids:
            shown["token_ids"] = [] if self._prompt_only else choice.token_ids
        return shown

    def _prompt_text(self, generation: Generation, index: int) -> str:
        prompt = self._request.prompts()[index // generation.call.n]
        return prompt if isinstance(prompt, str) else self._model.decode(prompt, special=True)

    def _logprobs(
        self, generation: Generation, index: int, choice: GeneratedChoice, echo: bool
    ) -> dict[str, Any] | None:
        offset, decoder = self._offsets.setdefault(index, (0, getincrementaldecoder("utf-8")("replace")))
        if self._request.logprobs is None:
            return None
        tokens: list[TokenLogprob | None] = []
        ids: list[int] = []
        before, text = 0, self._prompt_text(generation, index) if echo else ""
        if echo:
            prompt = generation.prompts[index // generation.call.n]
            tokens += choice.prompt_logprobs or [None] * len(prompt)
            ids += prompt
            before = len(prompt)
        if not self._prompt_only:
            tokens += choice.logprobs or []
            ids += [t.token_id for t in choice.logprobs or []]
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        spelled = self._model.token_text
        for i, (token_id, token) in enumerate(zip(ids, tokens)):
            name = self._model.token_name(token_id)
            out["tokens"].append(name)
            out["token_logprobs"].append(None if token is None else finite_logprob(token.logprob))
            out["top_logprobs"].append(None if token is None else self._top(token))
            out["text_offset"].append(offset)
            if spelled is not None:
                offset += spelled.count_characters(token_id, decoder, text if i < before else None, offset)
        self._offsets[index] = offset, decoder
        return out

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in top_with_own(token):
            # The likelier of two that look alike stays.
            top.setdefault(self._model.token_name(token_id), finite_logprob(logprob))
        return top
