"""Routes for operators: health, version, metrics. They answer at once in every state of the server."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from inferplane import __version__
from inferplane.serving import metrics
from inferplane.serving.service import Service
from inferplane.serving.wire import JsonObject


class HealthBody(JsonObject):
    """The server's health: a word, and why it is not ready."""

    status: str
    detail: str


class VersionBody(JsonObject):
    """The server's version."""

    version: str


def health_routes(service: Service) -> APIRouter:
    """Return the health routes: `live` decides about a restart, `ready` and `/health` about sending requests."""
    router = APIRouter()

    def answer(ok: bool) -> Response:
        condition = service.condition()
        body = HealthBody(status=condition.status, detail=condition.detail)
        return JSONResponse(body.model_dump(), 200 if ok else 503)

    @router.get("/v2/health/live")
    async def live() -> Response:
        return answer(service.condition().live)

    @router.get("/v2/health/ready")
    async def ready() -> Response:
        return answer(service.condition().ready)

    @router.get("/health")
    async def health() -> Response:
        return answer(service.condition().ready)

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
