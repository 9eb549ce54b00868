"""The HTTP application: routes, errors as OpenAI words them, the gate in front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from inferplane import __version__
from inferplane.serving import page
from inferplane.serving.errors import ApiError, internal
from inferplane.serving.http import generate, operation, text
from inferplane.serving.http.fast_path import AdmissionFastPath
from inferplane.serving.http.gate import App, Gate, Keys, Receive, Scope, Send
from inferplane.serving.http.openapi import describe
from inferplane.serving.http.responses import Answer, answered, refuse, told
from inferplane.serving.service import Service


class _Routes(FastAPI):
    """FastAPI, with a short way to the routes that generate: its layers cost as much as the rest of a request.

    `short` has what answers a POST to these paths. They are FastAPI's as well, which describes them and says which
    methods they have.
    """

    short: Mapping[str, Answer] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self.short.get(scope["path"]) if scope["method"] == "POST" else None
        if answer is None:
            await super().__call__(scope, receive, send)
        else:
            await answered(answer, scope, receive, send)


def full_app(service: Service) -> FastAPI:
    """Every route."""
    app = _app(
        service,
        [
            generate.routes(service),
            text.routes(service),
            operation.health_routes(service),
            operation.metrics_routes(service),
            operation.version_routes(),
            page.routes(service),
        ],
    )
    app.short = generate.answers(service)
    return app


def health_app(service: Service) -> FastAPI:
    """Health alone, for a port of its own."""
    return _app(service, [operation.health_routes(service)])


def metrics_app(service: Service) -> FastAPI:
    """Metrics and health, for a port of their own."""
    return _app(service, [operation.metrics_routes(service), operation.health_routes(service)])


def add_gate(app: FastAPI, service: Service, keys: Keys) -> tuple[App, Gate]:
    """An application behind its gate, and the gate. With origins named, browsers' questions are answered before it."""
    gate = Gate(app, service.settings, keys, AdmissionFastPath(service, generate.PATHS, generate.NATIVE))
    origins = service.settings.cors_origins
    if not origins:
        return gate, gate
    outer: Callable[..., App] = CORSMiddleware
    return outer(gate, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"]), gate


def _app(service: Service, routers: Iterable[APIRouter]) -> _Routes:
    async def on_http_error(request: Request, error: Exception) -> Response:
        return _no_route(service, error)

    app = _Routes(
        title="Inferplane",
        version=__version__,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={ApiError: _on_api_error, HTTPException: on_http_error, Exception: _on_fault},
    )
    for router in routers:
        app.router.routes.extend(router.routes)  # flat, so that anybody can list them
    describe(app)
    return app


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return told(error, request.scope)


def _no_route(service: Service, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "There is no such route.", 405: "This route has no such method."}
    shown = ApiError(error.status_code, words.get(error.status_code, str(error.detail)), code="http_error")
    service.refused(shown)
    response = refuse(shown, shown.body())
    response.headers.update(error.headers or {})
    return response


async def _on_fault(request: Request, error: Exception) -> Response:
    """A fault of our own, which the gate logs: clients read an error in the usual form."""
    return told(internal(), request.scope)
