"""Routes for operators: health, version, metrics. They answer at once in every state of the server."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from inferplane import __version__
from inferplane.serving import metrics
from inferplane.serving.service import Service
from inferplane.serving.wire import JsonObject


class HealthBody(JsonObject):
    """The server's health: a word, why it is not ready, and how late its event loop was in the last seconds."""

    status: str
    detail: str
    loop_lag_s: float


class VersionBody(JsonObject):
    """The server's version."""

    version: str


def health_routes(service: Service, outside: bool = False) -> APIRouter:
    """Return the health routes: `live` decides about a restart, `ready` and `/health` about sending requests.

    Args:
        service: whose health.
        outside: the routes run in a thread of their own, so they also tell that the service's event loop is stuck.
    """
    router = APIRouter()
    condition = service.condition_outside if outside else service.condition

    def answer(kind: Literal["live", "ready"]) -> Response:
        found = condition()
        lag_s = round(service.loop_lag.worst_s, 3)
        body = HealthBody(status=found.status, detail=found.detail, loop_lag_s=lag_s)
        return JSONResponse(body.model_dump(), 200 if getattr(found, kind) else 503)

    @router.get("/v2/health/live")
    async def live() -> Response:
        return answer("live")

    @router.get("/v2/health/ready")
    async def ready() -> Response:
        return answer("ready")

    @router.get("/health")
    async def health() -> Response:
        return answer("ready")

    return router


def metrics_routes(service: Service) -> APIRouter:
    """Return the route of the metrics for Prometheus."""
    router = APIRouter()

    @router.get("/metrics")
    async def numbers() -> Response:
        return Response(await metrics.render_metrics(service), media_type=metrics.CONTENT_TYPE)

    return router


def version_routes() -> APIRouter:
    """Return the route of the version."""
    router = APIRouter()

    @router.get("/version")
    async def version() -> Response:
        return JSONResponse(VersionBody(version=__version__).model_dump())

    return router
