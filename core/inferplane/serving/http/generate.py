"""Routes that generate. The fields of the body decide whether a request is in OpenAI's dialect or the native one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inferplane.serving import native
from inferplane.serving.errors import ApiError
from inferplane.serving.http import chat
from inferplane.serving.http.chat_wire import ChatRequest
from inferplane.serving.http.completions import CompletionRendering, CompletionRequest
from inferplane.serving.http.embeddings import EmbeddingRendering, EmbeddingRequest
from inferplane.serving.http.responses import GenerateResponse, Handler, error_response
from inferplane.serving.http.scope import Scope, context_of
from inferplane.serving.service import Service
from inferplane.serving.wire import parse, unknown_fields, validate

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
ALIASES = {f"{CHAT}/completions": COMPLETIONS, f"{CHAT}/chat/completions": CHAT}
"""Paths that OpenAI's client uses if its base URL is `.../v1/chat/completions`, as in the source system's example."""
NATIVE = (COMPLETIONS, CHAT, *ALIASES)
"""Routes that also accept the native dialect."""
PATHS = (*NATIVE, EMBEDDINGS)
"""Routes that need a slot."""

Dialect = Callable[[dict[str, Any], str], Awaitable[GenerateResponse]]
"""Makes the response from a body's fields and the request's id."""


def handlers(service: Service) -> dict[str, Handler]:
    """Return what answers a POST, by path. An ApiError that one raises is counted where it is answered."""
    found: dict[str, Handler] = {
        COMPLETIONS: _either_dialect(service, lambda data, request_id: _completion(service, data, request_id)),
        CHAT: _either_dialect(service, lambda data, request_id: _chat(service, data, request_id)),
        EMBEDDINGS: lambda scope, body: _embeddings(service, body),
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
        data = parse(body)
        request_id = context_of(scope).request_id
        if not native.is_native(data):
            return await openai(data, request_id)
        try:
            return await _native(service, data, request_id)
        except ApiError as error:
            service.count_refusal(error)
            return error_response(error, native.error_body_for(error, data))

    return handle


async def _completion(service: Service, data: dict[str, Any], request_id: str) -> GenerateResponse:
    request = validate(CompletionRequest, data)
    request.check_consistency()
    model = service.ready_model
    rendering = CompletionRendering(request, model, model.resolve_name(request.model), request_id)
    ignored = unknown_fields(request)
    return GenerateResponse(service, request.to_call(), rendering, stream=bool(request.stream), ignored=ignored)


async def _chat(service: Service, data: dict[str, Any], request_id: str) -> GenerateResponse:
    request = validate(ChatRequest, data)
    request.check_consistency()
    model = service.ready_model
    name = model.resolve_name(request.model)
    plan = chat.plan_tools(request)
    call = await chat.build_call(request, model, plan)
    rendering = chat.ChatRendering(request, plan, model, name, request_id)
    return GenerateResponse(service, call, rendering, stream=bool(request.stream), ignored=unknown_fields(request))


async def _embeddings(service: Service, body: bytes) -> GenerateResponse:
    request = validate(EmbeddingRequest, parse(body))
    model = service.ready_model
    rendering = EmbeddingRendering(request, model.resolve_name(request.model), model.info.width)
    call = request.to_call(service.settings.pooling)
    return GenerateResponse(service, call, rendering, stream=False, ignored=unknown_fields(request))


async def _native(service: Service, data: dict[str, Any], request_id: str) -> GenerateResponse:
    request = validate(native.NativeRequest, data)
    call = await native.build_call(request, service.ready_model, service.settings.native_text)
    rendering = native.NativeRendering(request, request_id)
    return GenerateResponse(service, call, rendering, stream=bool(request.stream), ignored=unknown_fields(request))
