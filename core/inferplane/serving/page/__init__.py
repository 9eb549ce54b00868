"""The status page: what the server does, in a browser. It loads nothing from elsewhere; its numbers are those of
/metrics.

A browser cannot send a bearer key. If keys are set, it asks for a name and a password: the password is a key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from inferplane import __version__
from inferplane.serving.errors import ApiError
from inferplane.serving.service import Service

FOLDER = Path(__file__).parent
FILES = {
    "/status": ("page.html", "text/html"),
    "/status/page.css": ("page.css", "text/css"),
    "/status/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes(service: Service, error_response: Callable[[ApiError, MutableMapping[str, Any]], Response]) -> APIRouter:
    """Return the routes of the page, its parts, and its data.

    Args:
        service: what the page shows.
        error_response: makes the response with an error to the request of a scope.
    """
    router = APIRouter(include_in_schema=False)
    for path, (name, kind) in FILES.items():
        content = (FOLDER / name).read_bytes()
        router.add_api_route(path, _file(content, kind), methods=["GET"])

    @router.get("/status/data")
    async def data() -> Response:
        condition = service.condition()
        server = {"status": condition.status, "ready": condition.ready, "detail": condition.detail}
        info = None
        if service.model is not None:
            info = {**asdict(service.model.info), "name": service.model.names[0]}  # not a path
            del info["folder"], info["tokenizer"]  # for other processes only; clients need not know the folder
        stats = await service.stats()
        return JSONResponse({"server": {**server, "version": __version__}, "info": info, "stats": stats})

    @router.get("/status/kernels")
    async def kernels(request: Request) -> Response:
        if service.engine is None or service.state not in ("serving", "draining"):
            error = ApiError(503, "There is no model that runs.", code="loading", retry_after_s=2)
            return error_response(error, request.scope)  # not counted: the page asks until there is one
        return JSONResponse(summarize_plan(await service.engine.explain()))

    return router


def _file(content: bytes, kind: str) -> Any:
    async def answer() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return answer


def summarize_plan(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the kernels of a plan's decoding step, each once with its number of sites, most sites first."""
    sites = [s for s in plan["sites"] if s["step_kind"] == "decode" and s["chosen"]["kernel"] != "decomposition"]
    keys = [(s["op"], s["chosen"]["kernel"], s["chosen"]["why"]) for s in sites]
    counts: Counter[tuple[str, str, str]] = Counter()
    for site, key in zip(sites, keys):
        counts[key] += _count_sites(site["site"])
    found = [{"op": op, "kernel": kernel, "sites": n, "why": why} for (op, kernel, why), n in counts.most_common()]
    return {"device": plan["device"], "kernels": found}


def _count_sites(site: str) -> int:
    """Return how many sites a line of a plan stands for: "layers.1-60.mlp" is 60."""
    total = 1
    for part in site.split("."):
        first, dash, last = part.partition("-")
        if dash and first.isdigit() and last.isdigit():
            total *= int(last) - int(first) + 1
    return total
