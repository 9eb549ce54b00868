"""Routes that generate. The native dialect lives on the same paths as OpenAI's, told apart by the body's fields."""

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
from inferplane.serving.http.gate import REQUEST_ID, Scope
from inferplane.serving.http.responses import Answer, Generation, refuse
from inferplane.serving.service import Service
from inferplane.serving.wire import parse, unknown_fields, validate

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
ALIASES = {f"{CHAT}/completions": COMPLETIONS, f"{CHAT}/chat/completions": CHAT}
"""What OpenAI's client asks for when its base URL is `.../v1/chat/completions`, as in the source system's example."""
NATIVE = (COMPLETIONS, CHAT, *ALIASES)
"""Routes that also speak the native dialect."""
PATHS = (*NATIVE, EMBEDDINGS)
"""Routes that take a place."""

Speak = Callable[[dict[str, Any], str], Awaitable[Generation]]
"""From a body's fields and the request's id to an answer."""


def answers(service: Service) -> dict[str, Answer]:
    """Of every path what answers a POST."""
    found: dict[str, Answer] = {
        COMPLETIONS: _bilingual(service, lambda data, request_id: _completion(service, data, request_id)),
        CHAT: _bilingual(service, lambda data, request_id: _chat(service, data, request_id)),
        EMBEDDINGS: lambda scope, body: _embeddings(service, body),
    }
    return {**found, **{alias: found[path] for alias, path in ALIASES.items()}}


def routes(service: Service) -> APIRouter:
    """Routes over a service, to be described and listed; `answers` is the short way to the same."""
    router = APIRouter()
    for path, answer in answers(service).items():
        router.add_api_route(
            path,
            _endpoint(answer),
            methods=["POST"],
            name="embeddings" if path == EMBEDDINGS else "endpoint",
            include_in_schema=path not in ALIASES,
        )
    return router


def _endpoint(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await answer(request.scope, await request.body())

    return endpoint


def _bilingual(service: Service, speak: Speak) -> Answer:
    """OpenAI's dialect or the native one, as the body speaks."""

    async def answer(scope: Scope, body: bytes) -> Response:
        with service.counted():
            data = parse(body)
        request_id = scope[REQUEST_ID]
        if not native.is_native(data):
            with service.counted():
                return await speak(data, request_id)
        try:
            with service.counted():
                return await _native(service, data, request_id)
        except ApiError as error:
            asked = data.get("req_id")
            return refuse(error, native.refusal(error, asked if isinstance(asked, str) else None))

    return answer


async def _completion(service: Service, data: dict[str, Any], request_id: str) -> Generation:
    request = validate(CompletionRequest, data)
    request.check_consistency()
    model = service.served
    rendering = CompletionRendering(request, model, model.resolve_name(request.model), request_id)
    ignored = unknown_fields(request)
    return Generation(service, request.ask(), rendering, stream=bool(request.stream), ignored=ignored)


async def _chat(service: Service, data: dict[str, Any], request_id: str) -> Generation:
    request = validate(ChatRequest, data)
    request.check_consistency()
    model = service.served
    name = model.resolve_name(request.model)
    plan = chat.tool_plan(request)
    ask = await chat.build_call(request, model, plan)
    rendering = chat.ChatRendering(request, plan, model, name, request_id)
    return Generation(service, ask, rendering, stream=bool(request.stream), ignored=unknown_fields(request))


async def _embeddings(service: Service, body: bytes) -> Generation:
    with service.counted():
        request = validate(EmbeddingRequest, parse(body))
        model = service.served
        rendering = EmbeddingRendering(request, model.resolve_name(request.model), model.info.width)
        ask = request.ask(service.settings.pooling)
    return Generation(service, ask, rendering, stream=False, ignored=unknown_fields(request))


async def _native(service: Service, data: dict[str, Any], request_id: str) -> Generation:
    request = validate(native.NativeRequest, data)
    ask = await native.build_call(request, service.served, service.settings.native_text)
    rendering = native.NativeRendering(request, request_id)
    return Generation(service, ask, rendering, stream=bool(request.stream), ignored=unknown_fields(request))
