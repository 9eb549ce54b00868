"""Refuses requests for which no slot is free before their route runs.

A burst of requests is answered in the order of arrival, and accepting a request costs many times what refusing one
costs. So refusals must not queue behind the work for accepted requests. Only a body that has already arrived is read,
to answer in the dialect of its sender. Accepted requests continue one by one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, MutableMapping
from typing import Any

from inferplane.serving import native
from inferplane.serving.errors import ApiError
from inferplane.serving.service import Service
from inferplane.serving.shared_state.slots import SlotReservation
from inferplane.serving.tracing import trace_headers
from inferplane.serving.wire import parse


class LoopPassLimiter:
    """Lets one task continue per pass of the event loop, so that the loop reads new requests in between."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._pass_used = False

    async def wait(self) -> None:
        """Wait until this task may continue; the first task of a pass continues at once."""
        loop = asyncio.get_running_loop()
        if not self._pass_used:
            self._pass_used = True
            loop.call_soon(self._release_next)
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _release_next(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # done: its client has left
                waiter.set_result(None)
                asyncio.get_running_loop().call_soon(self._release_next)
                return
        self._pass_used = False


class AdmissionFastPath:
    """Reserves a slot for each request that generates, or refuses it.

    Args:
        service: has the slots.
        paths: routes that generate.
        native_paths: those of them that also accept the native dialect.
    """

    def __init__(self, service: Service, paths: Collection[str], native_paths: Collection[str]) -> None:
        self._service, self._paths, self._native_paths = service, frozenset(paths), frozenset(native_paths)
        self.limiter = LoopPassLimiter()

    def applies_to(self, method: str, path: str) -> bool:
        """Return whether a request generates."""
        return method == "POST" and path in self._paths

    def reserve(self) -> SlotReservation:
        """Reserve a slot for a request.

        Raises:
            ApiError: 429 without a free slot, 503 while no model accepts requests.
        """
        _ = self._service.ready_model
        return SlotReservation(self._service.slots)

    def count_refusal(self, error: ApiError) -> None:
        """Count a refused request."""
        self._service.count_refusal(error)

    def trace_refusal(self, scope: MutableMapping[str, Any], status: int, reason: str, took_s: float) -> None:
        """Make a span of a request that was refused before another span covered it, if there are spans."""
        tracer = self._service.tracer
        if tracer is not None and self.applies_to(scope["method"], scope["path"]):
            route = scope["path"]
            attributes = {"http.request.method": "POST", "http.route": route, "http.response.status_code": status}
            tracer.trace_refusal(f"POST {route}", attributes, trace_headers(scope["headers"]), reason, took_s)

    def error_body(self, error: ApiError, path: str, body: bytes) -> dict[str, Any]:
        """Return the JSON of an error in the dialect of the request's body."""
        if path not in self._native_paths:
            return error.body()
        try:
            data = parse(body)
        except ApiError:
            return error.body()
        return native.error_body_for(error, data) if native.is_native(data) else error.body()
