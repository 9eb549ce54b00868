"""The HTTP application: routes, errors in OpenAI's form, and the gate in front of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from inferplane import __version__
from inferplane.serving import page
from inferplane.serving.errors import ApiError, internal
from inferplane.serving.http import generate, infer, operation, text
from inferplane.serving.http.fast_path import AdmissionFastPath
from inferplane.serving.http.gate import Gate
from inferplane.serving.http.openapi import describe_routes
from inferplane.serving.http.responses import Handler, error_response, plain_error_response, run_handler
from inferplane.serving.http.scope import App, Receive, Scope, Send
from inferplane.serving.keys import Keys
from inferplane.serving.kserve.names import error_body
from inferplane.serving.service import Service

MAX_PATH_CHARACTERS = 100
UNLISTED = ("/status", "/openapi.json")
"""Routes that are not part of the description of the interface, and that an answer to an unknown path names."""


class _Routes(FastAPI):
    """FastAPI with a direct way to the routes that generate: FastAPI's layers cost as much as the rest of a request.

    `direct_handlers` maps a path to what answers a POST. FastAPI knows these routes too: it describes them and answers
    their other methods.
    """

    service: Service
    direct_handlers: Mapping[str, Handler] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self.direct_handlers.get(scope["path"]) if scope["method"] == "POST" else None
        if handler is None:
            await super().__call__(scope, receive, send)
        else:
            await run_handler(self.service, handler, scope, receive, send)


def full_app(service: Service) -> FastAPI:
    """Make the application with every route."""
    routers = [generate.routes(service), text.routes(service), operation.health_routes(service), infer.routes(service)]
    routers += [operation.metrics_routes(service), operation.version_routes()]
    routers.append(page.routes(service, plain_error_response))
    app = _app(service, routers)
    app.direct_handlers = generate.handlers(service)
    return app


def health_app(service: Service) -> FastAPI:
    """Make an application with the health routes only, for a port and a thread of their own."""
    return _app(service, [operation.health_routes(service, outside=True)])


def metrics_app(service: Service) -> FastAPI:
    """Make an application with metrics and health, for a port of their own."""
    return _app(service, [operation.metrics_routes(service), operation.health_routes(service)])


def add_gate(app: FastAPI, service: Service, keys: Keys) -> tuple[App, Gate]:
    """Put the gate in front of an application.

    If the settings name origins, the preflight requests of browsers are answered before the gate.

    Returns:
        The application to serve, and its gate.
    """
    app.state.needs_key = bool(keys)
    body_paths = [route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ())]
    fast_path = AdmissionFastPath(service, generate.PATHS, generate.NATIVE)
    gate = Gate(app, service.settings, keys, fast_path, body_paths)
    origins = service.settings.cors_origins
    if not origins:
        return gate, gate
    with_cors: Callable[..., App] = CORSMiddleware
    return with_cors(gate, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"]), gate


def _app(service: Service, routers: Iterable[APIRouter]) -> _Routes:
    app = _Routes(
        title="Inferplane",
        version=__version__,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,  # `describe_routes` adds the route, which answers from memory
        redirect_slashes=False,
        exception_handlers={ApiError: _on_api_error, HTTPException: _no_route, Exception: _on_fault},
    )
    app.service = service
    for router in routers:
        app.router.routes.extend(router.routes)  # flat, so that the routes can be listed
    describe_routes(app)
    return app


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.app.service.count_refusal(error)
    return plain_error_response(error, request.scope)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    api_error = ApiError(error.status_code, _describe_routes_here(request, error), code="http_error")
    request.app.service.count_refusal(api_error)
    response = error_response(api_error, error_body(api_error, request.scope["path"]))
    response.headers.update(error.headers or {})
    return response


def _describe_routes_here(request: Request, error: HTTPException) -> str:
    """What was requested, and which routes there are."""
    method, path = request.method, request.url.path[:MAX_PATH_CHARACTERS]
    if error.status_code == 405:
        return f"{path} has no {method}; it has {(error.headers or {}).get('Allow', 'other methods')}."
    if error.status_code != 404:
        return str(error.detail)
    there_are = dict.fromkeys(
        f"{' or '.join(sorted(route.methods - {'HEAD'}))} {route.path}"
        for route in request.app.routes
        if isinstance(route, Route) and route.methods and (route.include_in_schema or route.path in UNLISTED)
    )
    return f"There is no {method} {path}. There is: {', '.join(there_are)}. docs/serving.md says what each does."


async def _on_fault(request: Request, error: Exception) -> Response:
    """Answer a fault of the server's own; the gate logs it."""
    return plain_error_response(internal(), request.scope)
