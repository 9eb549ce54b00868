"""Embeddings in OpenAI's format: hidden states of the served model, pooled to vectors of length 1.

They run as requests of one token, which is discarded, in the same queue, under the same limits and cancellation.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from inferplane.engine.clients.embedding import finish_embedding
from inferplane.errors import GenerationError
from inferplane.serving.admission import GenerateCall
from inferplane.serving.errors import ApiError, invalid
from inferplane.serving.generation import Generation
from inferplane.serving.rendering import GeneratedChoice, Rendering
from inferplane.serving.wire import FORMS, MAX_TOKENS, JsonObject, ManyTokenIds, RequestBody, Texts, Timeout, TokenIds

WORDS = {"prompt": "input", "n": "input", "timeout_s": "timeout"}


class EmbeddingRequest(RequestBody):
    """Texts or token ids to turn into vectors."""

    model: str | None = Field(None, max_length=4096)
    input: Annotated[str, Field(min_length=1)] | Texts | TokenIds | ManyTokenIds = Field(
        description=f"{FORMS}a text, a list of texts, a list of token ids, a list of lists of token ids; none empty."
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        None, description="Number of leading entries of a vector to keep."
    )
    pooling: Literal["last", "mean"] | None = Field(None, description="Overrides the server's setting.")
    user: str | None = Field(None, max_length=4096)
    timeout: Timeout | None = Field(None, description="Seconds for the whole request.")

    def to_call(self, pooling: str) -> GenerateCall:
        """Return the call that the request makes.

        Args:
            pooling: applies if the request names none.
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
    """Tokens in; no tokens are generated."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(JsonObject):
    """A vector for each input, in their order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage


class EmbeddingRendering(Rendering):
    """The answer to one `EmbeddingRequest`; it is never streamed.

    Args:
        request: the request.
        model: the model's name for the client.
        width: entries of a full vector.

    Raises:
        ApiError: the request has more dimensions than the model.
    """

    def __init__(self, request: EmbeddingRequest, model: str, width: int) -> None:
        if request.dimensions is not None and request.dimensions > width:
            raise invalid(f"dimensions = {request.dimensions}; this model has {width}.", "dimensions")
        self._request, self._model = request, model

    def full_response(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> Mapping[str, Any]:
        data = [self._entry(i, choice) for i, choice in enumerate(choices)]
        usage = {"prompt_tokens": generation.prompt_tokens, "total_tokens": generation.prompt_tokens}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _entry(self, index: int, choice: GeneratedChoice) -> dict[str, Any]:
        try:
            vector = finish_embedding(choice.embedding, self._request.dimensions)
        except GenerationError as error:
            raise ApiError(500, error.what, code="generation_failed") from error
        if self._request.encoding_format == "base64":
            data: Any = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        else:
            data = vector
        return {"object": "embedding", "index": index, "embedding": data}
