"""Embeddings, as OpenAI words them: hidden states of the served model, pooled to vectors of length 1.

They run as requests of one token that nobody reads, in the same queue, under the same limits, and are cancelled alike.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from inferplane.engine.embedding import finished
from inferplane.errors import GenerationError
from inferplane.serving.admission import GenerateCall
from inferplane.serving.errors import ApiError, invalid
from inferplane.serving.generation import Generation, Piece
from inferplane.serving.rendering import SSE, GeneratedChoice
from inferplane.serving.wire import FORMS, MAX_TOKENS, Body, JsonObject, Timeout, TokenId

WORDS = {"prompt": "input", "n": "input", "timeout_s": "timeout"}
Tokens = Annotated[list[TokenId], Field(min_length=1)]


class EmbeddingRequest(Body):
    """Texts, or token ids, of which vectors are asked for."""

    model: str | None = Field(None, max_length=4096)
    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1)]
    ) = Field(
        description=f"{FORMS}a text, a list of texts, a list of token ids, a list of lists of token ids; none empty."
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        None, description="Keep so many of a vector's first entries."
    )
    pooling: Literal["last", "mean"] | None = Field(None, description="Instead of the server's own.")
    user: str | None = Field(None, max_length=4096)
    timeout: Timeout | None = Field(None, description="Seconds for the whole request.")

    def ask(self, pooling: str) -> GenerateCall:
        """What is asked of the engine.

        Args:
            pooling: where the request names none.
        """
        given: Any = self.input
        prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        sampling = {"temperature": 0.0, "ignore_eos": True, "pooling": self.pooling or pooling}
        model = self.model or ""
        more: Any = {"timeout_s": self.timeout, "operation": "embeddings", "model": model, "words": WORDS}
        return GenerateCall(prompts, sampling, max_tokens=1, **more)


class EmbeddingEntry(JsonObject):
    """One vector: numbers, or in base64 the bytes of float32 numbers, little-endian."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(JsonObject):
    """Tokens in; nothing comes out."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(JsonObject):
    """A vector for each input, in their order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage


class EmbeddingRendering:
    """Answers one request; there is no stream of it.

    Args:
        request: what was asked.
        model: its name.
        width: entries of a whole vector.

    Raises:
        ApiError: more dimensions are asked for than there are.
    """

    media_type, ping = SSE, b""

    def __init__(self, request: EmbeddingRequest, model: str, width: int) -> None:
        if request.dimensions is not None and request.dimensions > width:
            raise invalid(f"dimensions = {request.dimensions}; this model has {width}.", "dimensions")
        self._request, self._model = request, model

    def whole(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> Mapping[str, Any]:
        """The answer."""
        data = [self._one(i, choice) for i, choice in enumerate(choices)]
        usage = {"prompt_tokens": generation.prompt_tokens, "total_tokens": generation.prompt_tokens}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _one(self, index: int, choice: GeneratedChoice) -> dict[str, Any]:
        try:
            vector = finished(choice.embedding, self._request.dimensions)
        except GenerationError as error:
            raise ApiError(500, error.what, code="generation_failed") from error
        if self._request.encoding_format == "base64":
            data: Any = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        else:
            data = vector
        return {"object": "embedding", "index": index, "embedding": data}

    def refusal(self, error: ApiError) -> Mapping[str, Any]:
        """The body of an error."""
        return error.body()

    def opening(self, generation: Generation) -> bytes:
        """Nothing: see above."""
        return b""

    def piece(self, generation: Generation, piece: Piece) -> bytes:
        """Nothing."""
        return b""

    def closing(self, generation: Generation) -> bytes:
        """Nothing."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """Nothing."""
        return b""
