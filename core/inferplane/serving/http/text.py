"""Routes about text and models that do not generate: tokenize, detokenize, tokenizer_info, models.

Those about tokens have the same form as in other servers
(https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html). The chat template is no secret: a client can
read it from the tokens that `/tokenize` makes of a conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from inferplane.errors import UsageError
from inferplane.serving import native
from inferplane.serving.admission import Deadline
from inferplane.serving.chat.call import render_messages
from inferplane.serving.chat_template.fields import list_unread_keys
from inferplane.serving.errors import invalid
from inferplane.serving.http.body_checks import DETOKENIZE, TOKENIZE
from inferplane.serving.http.responses import report_ignored_fields
from inferplane.serving.http.scope import Scope, find_held
from inferplane.serving.http.tokens import read_detokenize, read_tokenize
from inferplane.serving.model import DEFAULT_NAME
from inferplane.serving.rendering import encode_json
from inferplane.serving.service import Service
from inferplane.serving.wire import JsonObject


class TokenizeResponse(JsonObject):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(JsonObject):
    """A text."""

    prompt: str


class TokenizerInfo(JsonObject):
    """What `tokenizer_config.json` says, as far as clients need it; special tokens as text."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    model_max_length: int
    chat_template: str | None


class ModelCard(JsonObject):
    """The served model, under one of its names."""

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
    """Return the routes."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_card(service, name) for name in _names(service)]})

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if model not in _names(service):
            service.ready_model.resolve_name(model)
        return JSONResponse(_card(service, model))

    @router.post(TOKENIZE)
    async def tokenize(request: Request) -> Response:
        deadline = Deadline(service.settings.request_timeout_s)
        return await deadline.enforce(_tokenize(service, request.scope, await request.body()))

    @router.post(DETOKENIZE)
    async def detokenize(request: Request) -> Response:
        deadline = Deadline(service.settings.request_timeout_s)
        return await deadline.enforce(_detokenize(service, request.scope, await request.body()))

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        try:
            return JSONResponse(service.ready_model.describe_tokenizer())
        except UsageError as error:
            raise invalid(error.what, "model") from error

    return router


def _names(service: Service) -> list[str]:
    return [*service.ready_model.names, DEFAULT_NAME]


def _card(service: Service, name: str) -> dict[str, Any]:
    model = service.ready_model
    info: dict[str, Any] = {field: getattr(model.info, field) for field in ("max_model_len", "device", "dtype")}
    own: dict[str, Any] = {"created": model.created, "owned_by": "inferplane", "root": model.names[0]}
    return ModelCard(id=name, defaults=DEFAULTS, **own, **info).model_dump()


async def _tokenize(service: Service, scope: Scope, body: bytes) -> Response:
    data = await service.read_json(TOKENIZE, body, find_held(scope))
    request = await service.read(len(body), read_tokenize, data, service.prompt_limits)
    model = service.ready_model
    model.resolve_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("One of prompt and messages is required.", "prompt", "missing_required_parameter")
    ignored: Sequence[str] = ()
    if request.messages is not None:
        async with model.use_template(request.chat_template) as template:
            facts = template.facts if template is not None else None
            variables = request.template_variables(facts, model.reply_form(facts))
            text = await render_messages(request.messages, request.tools, template, variables)
        special = bool(request.add_special_tokens)
        ignored = [*variables.ignored, *list_unread_keys(request.messages, facts)]
    else:
        text, special = request.prompt or "", request.add_special_tokens is not False
    ids = await service.encode(text, special=special)
    out: dict[str, Any] = {"count": len(ids), "max_model_len": model.info.max_model_len, "tokens": ids}
    if request.return_token_strs:
        out["token_strs"] = await service.read(len(body), lambda: [model.token_name(i) for i in ids])
    headers = report_ignored_fields(service.count_ignored(request, ignored))
    return Response(encode_json(out), headers=headers, media_type="application/json")


async def _detokenize(service: Service, scope: Scope, body: bytes) -> Response:
    data = await service.read_json(DETOKENIZE, body, find_held(scope))
    model = service.ready_model
    request = await service.read(len(body), read_detokenize, data, service.prompt_limits)
    model.resolve_name(request.model)
    bad = next((t for t in request.tokens if t >= model.info.vocab), None)
    if bad is not None:
        raise invalid(f"Token id {bad} is not in the vocabulary, which has ids 0 to {model.info.vocab - 1}.", "tokens")
    try:
        text = await service.read(len(body), partial(model.decode, request.tokens, special=True))
    except UsageError as error:
        raise invalid(error.what, "model") from error
    return JSONResponse({"prompt": text}, headers=report_ignored_fields(service.count_ignored(request)))
