"""Routes about text and models that generate nothing: tokenize, detokenize, models.

`/tokenize` and `/detokenize` have the form that other servers have.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from inferplane.errors import UsageError
from inferplane.serving import native
from inferplane.serving.errors import invalid
from inferplane.serving.http.chat import rendered
from inferplane.serving.http.chat_wire import MAX_TOOLS, Message, Tool
from inferplane.serving.http.responses import ignored_header
from inferplane.serving.model import DEFAULT_NAME
from inferplane.serving.service import Service
from inferplane.serving.wire import Body, JsonObject, TokenId, parse, unknown_fields, validate


class TokenizeRequest(Body):
    """A text, or a conversation, of which the token ids are asked for."""

    model: str | None = Field(None, max_length=4096)
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(JsonObject):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Token ids of which the text is asked for."""

    model: str | None = Field(None, max_length=4096)
    tokens: list[TokenId]


class DetokenizeResponse(JsonObject):
    """A text."""

    prompt: str


class ModelCard(JsonObject):
    """A model that is served, under one of its names."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    max_model_len: int
    device: str
    dtype: str
    defaults: dict[str, dict[str, float | int | None]]


class ModelList(JsonObject):
    """All names of the model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


DEFAULTS: dict[str, dict[str, float | int | None]] = {
    "openai": {"temperature": 1.0, "top_p": 1.0, "max_tokens (completions)": 16},
    "native": {"temperature": native.DEFAULT_TEMPERATURE, "topp": native.DEFAULT_TOP_P, "min_dec_len": 1},
}


def routes(service: Service) -> APIRouter:
    """Routes over a service."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> Response:
        with service.counted():
            return JSONResponse({"object": "list", "data": [_card(service, name) for name in _names(service)]})

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        with service.counted():
            if model not in _names(service):
                service.served.resolve_name(model)
            return JSONResponse(_card(service, model))

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await request.body()
        with service.counted():
            return await _tokenize(service, parse(body))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await request.body()
        with service.counted():
            return _detokenize(service, parse(body))

    return router


def _names(service: Service) -> list[str]:
    return [*service.served.names, DEFAULT_NAME]


def _card(service: Service, name: str) -> dict[str, Any]:
    model = service.served
    card = ModelCard(
        id=name,
        created=model.created,
        owned_by="inferplane",
        root=model.names[0],
        max_model_len=model.info.max_model_len,
        device=model.info.device,
        dtype=model.info.dtype,
        defaults=DEFAULTS,
    )
    return card.model_dump()


async def _tokenize(service: Service, data: dict[str, Any]) -> Response:
    asked = validate(TokenizeRequest, data)
    model = service.served
    model.resolve_name(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("One of prompt and messages is required.", "prompt", "missing_required_parameter")
    if asked.messages is not None:
        text, special = await rendered(asked.messages, asked.tools, model), bool(asked.add_special_tokens)
    else:
        text, special = asked.prompt or "", asked.add_special_tokens is not False
    ids = await service.encode(text, special=special)
    out: dict[str, Any] = {"count": len(ids), "max_model_len": model.info.max_model_len, "tokens": ids}
    if asked.return_token_strs:
        spelled = model.token_text
        out["token_strs"] = [spelled.name_of(i) if spelled is not None else str(i) for i in ids]
    return JSONResponse(out, headers=ignored_header(unknown_fields(asked)))


def _detokenize(service: Service, data: dict[str, Any]) -> Response:
    asked = validate(DetokenizeRequest, data)
    model = service.served
    model.resolve_name(asked.model)
    bad = next((t for t in asked.tokens if t >= model.info.vocab), None)
    if bad is not None:
        raise invalid(f"Token id {bad} is not in the vocabulary, which has ids 0 to {model.info.vocab - 1}.", "tokens")
    try:
        text = model.decode(asked.tokens, special=True)
    except UsageError as error:
        raise invalid(error.what, "model") from error
    return JSONResponse({"prompt": text}, headers=ignored_header(unknown_fields(asked)))
