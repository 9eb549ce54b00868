"""The door to the routes that generate: a request for which there is no place is refused before they are entered.

A burst is answered in the order of its arrival, and to accept a request costs many times what it costs to refuse one.
So refusals do not stand in line behind the work of those that were accepted. Only a body that is there already is read,
and only to learn which dialect's error its sender understands; and those that were accepted go on one by one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, MutableMapping
from typing import Any

from inferplane.serving import native
from inferplane.serving.errors import ApiError
from inferplane.serving.service import Service
from inferplane.serving.slots import SlotReservation
from inferplane.serving.tracing import carried
from inferplane.serving.wire import parse


class LoopPassLimiter:
    """Lets those who wait go on one by one, one in each pass of the loop: what came meanwhile is heard in between."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def mine(self) -> None:
        """Wait for a turn; the first one in a pass goes on at once."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its client has not left
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False


class AdmissionFastPath:
    """See above.

    Args:
        service: has the places.
        paths: of the routes that generate.
        native: those among them that also speak the native dialect.
    """

    def __init__(self, service: Service, paths: Collection[str], native: Collection[str]) -> None:
        self._service, self._paths, self._native = service, frozenset(paths), frozenset(native)
        self.turns = LoopPassLimiter()

    def leads(self, method: str, path: str) -> bool:
        """Whether a request generates."""
        return method == "POST" and path in self._paths

    def enter(self) -> SlotReservation:
        """A place for a request; ApiError 429 when there is none, 503 while there is no model that takes requests."""
        _ = self._service.served
        return SlotReservation(self._service.slots)

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
