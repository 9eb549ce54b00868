"""The OpenAPI description of the routes, generated from the models that validate requests."""

from __future__ import annotations

from itertools import chain
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from inferplane.serving.chat.request import ChatRequest
from inferplane.serving.chat.response import ChatResponse
from inferplane.serving.http import infer, operation, text
from inferplane.serving.http.completions import CompletionRequest, CompletionResponse
from inferplane.serving.http.embeddings import EmbeddingRequest, EmbeddingResponse
from inferplane.serving.http.tokens import DetokenizeRequest, TokenizeRequest
from inferplane.serving.kserve.names import is_kserve
from inferplane.serving.native import NativeError, NativeRequest, NativeResponse
from inferplane.serving.wire import ErrorBody

PATH = "/openapi.json"
REF = "#/components/schemas/"
Models = tuple[type[BaseModel], ...]

BODIES: dict[str, tuple[Models, Models]] = {
    "/v1/completions": ((CompletionRequest, NativeRequest), (CompletionResponse, NativeResponse)),
    "/v1/chat/completions": ((ChatRequest, NativeRequest), (ChatResponse, NativeResponse)),
    "/v1/embeddings": ((EmbeddingRequest,), (EmbeddingResponse,)),
    "/v1/models": ((), (text.ModelList,)),
    "/v1/models/{model}": ((), (text.ModelCard,)),
    "/tokenize": ((TokenizeRequest,), (text.TokenizeResponse,)),
    "/detokenize": ((DetokenizeRequest,), (text.DetokenizeResponse,)),
    "/tokenizer_info": ((), (text.TokenizerInfo,)),
    **dict.fromkeys(("/health", "/v2/health/live", "/v2/health/ready"), ((), (operation.HealthBody,))),
    "/version": ((), (operation.VersionBody,)),
    "/v2": ((), (infer.ServerMetadata,)),
    "/v2/models/{model}": ((), (infer.ModelMetadata,)),
    "/v2/models/{model}/ready": ((), (infer.ModelReady,)),
    "/v2/models/{model}/infer": ((infer.InferRequest,), (infer.InferResponse,)),
}
"""Path -> the models of its requests and of its answers."""
NATIVE = ("/v1/completions", "/v1/chat/completions")
ERRORS = {
    "400": "the request is invalid; `param` names the field",
    "401": "the key is missing or wrong",
    "404": "no such model or route",
    "408": "the body did not arrive in time, or the request ran into its own `timeout`",
    "409": "a request with this id is running",
    "413": "the body is too large",
    "415": "the body is not JSON",
    "429": "the queue is full; see Retry-After",
    "500": "the request failed inside the server",
    "503": "loading, shutting down, or not healthy",
    "504": "the request ran into the server's time limit",
}


def describe_routes(app: FastAPI) -> None:
    """Set an application's OpenAPI description, and add the route `PATH` that answers it; routes need a key in it if
    `app.state.needs_key` is true.

    The document is made and rendered once, at the first request: it is large, and to render it each time would cost
    the event loop a few milliseconds.
    """
    rendered: list[bytes] = []

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    async def answer(request: Request) -> Response:
        if not rendered:
            rendered.append(bytes(JSONResponse(openapi()).body))
        return Response(rendered[0], media_type="application/json")

    app.openapi = openapi  # type: ignore[method-assign]
    app.router.routes.insert(0, Route(PATH, answer, include_in_schema=False))


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models: set[type[BaseModel]] = {ErrorBody, NativeError, infer.InferError}
    models.update(*chain(*BODIES.values()))
    modes: list[Any] = [(m, "validation") for m in sorted(models, key=lambda m: m.__name__)]
    _, schemas = models_json_schema(modes, ref_template=REF + "{model}")
    document.setdefault("components", {})["schemas"] = schemas["$defs"]
    needs_key = getattr(app.state, "needs_key", False)
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation_ in operations.values():
            _fill(path, operation_)
            if needs_key and "health" not in path:
                operation_["security"] = [{"key": []}]
    return document


def _fill(path: str, operation_: dict[str, Any]) -> None:
    requests, answers = BODIES.get(path, ((), ()))
    if requests:
        content = {"application/json": {"schema": _one_of(requests)}}
        operation_["requestBody"] = {"required": True, "content": content}
    answer: dict[str, Any] = {"application/json": {"schema": _one_of(answers)}} if answers else {}
    if path in NATIVE:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    if path.endswith("/infer"):
        answer["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    if path == "/metrics":
        answer["text/plain"] = {"schema": {"type": "string"}}
    operation_["responses"] = {"200": {"description": "done", "content": answer}}
    error = _one_of((infer.InferError,) if is_kserve(path) else (ErrorBody, NativeError)[: 1 + (path in NATIVE)])
    for status, words in ERRORS.items():
        shape = _one_of((operation.HealthBody, ErrorBody)) if "health" in path else error
        if status == "503" and path.endswith("/ready") and is_kserve(path):
            shape = _one_of((infer.ModelReady, infer.InferError))
        operation_["responses"][status] = {"description": words, "content": {"application/json": {"schema": shape}}}


def _one_of(models: Models) -> dict[str, Any]:
    found = [{"$ref": REF + m.__name__} for m in models]
    return found[0] if len(found) == 1 else {"anyOf": found}
