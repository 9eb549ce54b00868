"""The door to the routes that generate: a request for which there is no place is refused before they are entered.

A burst is answered in the order of its arrival, and to accept a request costs many times what it costs to refuse one.
So refusals do not stand in line behind the work of those that were accepted: only a body that is there already is read,
and only to learn which dialect's error its sender understands.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any

from inferplane.serving import native
from inferplane.serving.errors import ApiError
from inferplane.serving.places import Reserved
from inferplane.serving.service import Service
from inferplane.serving.tracing import carried
from inferplane.serving.wire import parse


class Door:
    """See above.

    Args:
        service: has the places.
        paths: of the routes that generate.
        native: those among them that also speak the native dialect.
    """

    def __init__(self, service: Service, paths: Collection[str], native: Collection[str]) -> None:
        self._service, self._paths, self._native = service, frozenset(paths), frozenset(native)

    def leads(self, method: str, path: str) -> bool:
        """Whether a request generates."""
        return method == "POST" and path in self._paths

    def enter(self) -> Reserved:
        """A place for a request; ApiError 429 when there is none, 503 while there is no model that takes requests."""
        _ = self._service.served
        return Reserved(self._service.places)

    def refused(self, error: ApiError) -> None:
        """Count a request that was refused."""
        self._service.refused(error)

    def trace(self, scope: MutableMapping[str, Any], status: int, why: str, took_s: float) -> None:
        """Make a span, where they are wanted, of a request that was refused before one followed it."""
        tracer = self._service.tracer
        if tracer is not None and self.leads(scope["method"], scope["path"]):
            route = scope["path"]
            told = {"http.request.method": "POST", "http.route": route, "http.response.status_code": status}
            tracer.refused(f"POST {route}", told, carried(scope["headers"]), why, took_s)

    def words(self, error: ApiError, path: str, body: bytes) -> dict[str, Any]:
        """An error in the dialect of a body."""
        if path not in self._native:
            return error.body()
        try:
            data = parse(body)
        except ApiError:
            return error.body()
        if not native.is_native(data):
            return error.body()
        asked = data.get("req_id")
        return native.refusal(error, asked if isinstance(asked, str) else None)
