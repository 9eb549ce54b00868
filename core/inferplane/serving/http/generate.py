"""Routes that generate. The fields of the body decide whether a request is in OpenAI's dialect or the native one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inferplane.serving import native
from inferplane.serving.admission import Deadline, GenerateCall
from inferplane.serving.chat import call as chat
from inferplane.serving.chat.rendering import ChatRendering
from inferplane.serving.chat.tools import plan_tools
from inferplane.serving.errors import ApiError
from inferplane.serving.http.body_checks import (
    ALIASES,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    read_chat,
    read_completion,
    read_embedding,
    read_native,
)
from inferplane.serving.http.completions import CompletionRendering
from inferplane.serving.http.embeddings import EmbeddingRendering
from inferplane.serving.http.responses import GenerateResponse, Handler, error_response
from inferplane.serving.http.scope import Scope, context_of, find_held
from inferplane.serving.large_bodies.reader import InvalidBody
from inferplane.serving.rendering import Rendering
from inferplane.serving.service import Service
from inferplane.serving.wire import RequestBody

NATIVE = (COMPLETIONS, CHAT, *ALIASES)
"""Routes that also accept the native dialect."""
PATHS = (*NATIVE, EMBEDDINGS)
"""Routes that need a slot."""

Dialect = Callable[[dict[str, Any], int, str], Awaitable[GenerateResponse]]
"""Makes the response from a body's fields, its length in bytes, and the request's id."""


def handlers(service: Service) -> dict[str, Handler]:
    """Return what answers a POST, by path. An ApiError that one raises is counted where it is answered."""
    found: dict[str, Handler] = {
        COMPLETIONS: _either_dialect(service, partial(_completion, service)),
        CHAT: _either_dialect(service, partial(_chat, service)),
        EMBEDDINGS: lambda scope, body: _embeddings(service, scope, body),
    }
    return {**found, **{alias: found[path] for alias, path in ALIASES.items()}}


def routes(service: Service) -> APIRouter:
    """Return the routes for FastAPI, which describes them; `handlers` is the direct way to the same."""
    router = APIRouter()
    for path, handler in handlers(service).items():
        router.add_api_route(
            path,
            _endpoint(handler),
            methods=["POST"],
            name="embeddings" if path == EMBEDDINGS else "endpoint",
            include_in_schema=path not in ALIASES,
        )
    return router


def _endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request.scope, await request.body())

    return endpoint


def _either_dialect(service: Service, openai: Dialect) -> Handler:
    """Return a handler for bodies in OpenAI's dialect or in the native one."""

    async def handle(scope: Scope, body: bytes) -> Response:
        context = context_of(scope)
        try:
            deadline, data = await _read_json(service, scope, body)
        except InvalidBody as refused:  # of the native dialect
            service.count_refusal(refused.error)
            return error_response(refused.error, native.error_body_for(refused.error, refused.fields))
        if not native.is_native(data):
            return await deadline.enforce(openai(data, len(body), context.request_id))
        native.refuse_mixture(data)
        try:
            return await deadline.enforce(_native(service, data, len(body), context.request_id))
        except ApiError as error:
            service.count_refusal(error)
            return error_response(error, native.error_body_for(error, data))

    return handle


async def _read_json(service: Service, scope: Scope, body: bytes) -> tuple[Deadline, dict[str, Any]]:
    """Return the request's time limit, which begins now and holds for the reading too, and the body's fields."""
    deadline = context_of(scope).deadline = Deadline(service.settings.request_timeout_s)
    data = await deadline.enforce(service.read_json(scope["path"], body, find_held(scope)))
    deadline.shorten(data.get("timeout"))
    return deadline, data


async def _completion(service: Service, data: dict[str, Any], num_bytes: int, request_id: str) -> GenerateResponse:
    model = service.ready_model
    request = await service.read(num_bytes, read_completion, data, service.prompt_limits)
    request.check_consistency()
    rendering = CompletionRendering(request, model, model.resolve_name(request.model), request_id)
    return _response(service, request, request.to_call(), rendering, stream=bool(request.stream))


async def _chat(service: Service, data: dict[str, Any], num_bytes: int, request_id: str) -> GenerateResponse:
    request = await service.read(num_bytes, read_chat, data, service.prompt_limits)
    tools = await service.read(num_bytes, plan_tools, request)
    model = service.ready_model
    name = model.resolve_name(request.model)
    call, plan = await chat.build_call(request, model, tools)
    rendering = ChatRendering(request, plan, model, name, request_id)
    return _response(service, request, call, rendering, stream=bool(request.stream))


async def _embeddings(service: Service, scope: Scope, body: bytes) -> GenerateResponse:
    deadline, data = await _read_json(service, scope, body)
    model = service.ready_model
    request = await deadline.enforce(service.read(len(body), read_embedding, data, service.prompt_limits))
    rendering = EmbeddingRendering(request, model.resolve_name(request.model), model.info.width)
    call = request.to_call(service.settings.pooling)
    return _response(service, request, call, rendering, stream=False)


async def _native(service: Service, data: dict[str, Any], num_bytes: int, request_id: str) -> GenerateResponse:
    model = service.ready_model
    request = await service.read(num_bytes, read_native, data, service.prompt_limits)
    call = await native.build_call(request, model, service.settings.native_text)
    rendering = native.NativeRendering(request, request_id)
    return _response(service, request, call, rendering, stream=bool(request.stream))


def _response(
    service: Service, request: RequestBody, call: GenerateCall, rendering: Rendering, *, stream: bool
) -> GenerateResponse:
    """Return the response; raise ApiError 400 if the settings refuse a field of the request that has no effect."""
    ignored = service.count_ignored(request, call.ignored)
    return GenerateResponse(service, call, rendering, stream=stream, ignored=ignored)
