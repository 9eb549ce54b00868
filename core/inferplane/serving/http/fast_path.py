"""Refuses requests for which no slot is free before their route runs.

A burst of requests is answered in the order of arrival, and accepting a request costs many times what refusing one
costs. So refusals must not queue behind the work for accepted requests. Only a body that has already arrived is read,
to answer in the dialect of its sender. Accepted requests continue one by one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, MutableMapping
from typing import Any

from inferplane.serving import native
from inferplane.serving.bodies import LARGE_BYTES, BodyMemory
from inferplane.serving.errors import ApiError
from inferplane.serving.keys import AccessKey
from inferplane.serving.kserve.names import error_body, is_infer_path
from inferplane.serving.service import Result, Service
from inferplane.serving.shared_state.slots import SlotReservation
from inferplane.serving.tracing import trace_headers
from inferplane.serving.wire import parse

MAX_SKIPPED_PASSES = 32
"""Most passes in succession in which a limiter lets none of its tasks continue, because those of another one do."""


class LoopPassLimiter:
    """Lets a few tasks continue per pass of the event loop, so that the loop does other work in between. Clients take
    turns: one that sends many requests at once delays its own, hardly those of others.

    Args:
        per_pass: how many.
        after: passes in which tasks of a client continue there, or wait, are left to them, most of them at least: the
            same client's tasks wait here. Those of others do not.
    """

    def __init__(self, per_pass: int = 1, after: LoopPassLimiter | None = None) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Tasks that wait, by client; the client whose turn is next comes first."""
        self._per_pass = self._left = per_pass
        self._after, self._skipped = after, 0
        self._continued: set[str] = set()
        """Clients of which tasks have continued in this pass."""
        self._is_scheduled = False
        """Whether the event loop will call `_begin_pass`."""

    async def wait(self, client: str = "") -> None:
        """Wait until this task may continue. The first tasks of a pass continue at once; others wait in their order,
        one task of each client after the other.
        """
        self._schedule()
        if self._left and not self._waiting and not self._must_skip(client):
            self._left -= 1
            self._continued.add(client)
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(waiter)
        await waiter

    def _must_skip(self, client: str) -> bool:
        return self._after is not None and self._after._is_busy_for(client) and self._skipped < MAX_SKIPPED_PASSES

    def _is_busy_for(self, client: str) -> bool:
        """Whether tasks of a client have continued in this pass, or wait."""
        return client in self._continued or client in self._waiting

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_pass)

    def _begin_pass(self) -> None:
        """Begin a pass: those that have waited come first."""
        self._is_scheduled = False
        self._left = self._per_pass
        self._continued.clear()
        if not self._waiting:
            return
        self._schedule()
        clients = deque(client for client in self._waiting if not self._must_skip(client))
        self._skipped = self._skipped + 1 if len(clients) < len(self._waiting) else 0
        while clients and self._left:
            client = clients.popleft()
            tasks = self._waiting.pop(client)
            waiter = tasks.popleft()
            if tasks:
                self._waiting[client] = tasks  # behind the other clients
                clients.append(client)
            if not waiter.done():  # done: its client has left
                waiter.set_result(None)
                self._left -= 1
                self._continued.add(client)


class AdmissionFastPath:
    """Reserves a slot for each request that generates, or refuses it.

    Args:
        service: has the slots.
        paths: routes that generate.
        native_paths: those of them that also accept the native dialect.
    """

    def __init__(self, service: Service, paths: Collection[str], native_paths: Collection[str]) -> None:
        self._service, self._paths, self._native_paths = service, frozenset(paths), frozenset(native_paths)

    def applies_to(self, method: str, path: str) -> bool:
        """Return whether a request generates."""
        return method == "POST" and (path in self._paths or is_infer_path(path))

    def reserve(self, key: AccessKey | None) -> SlotReservation:
        """Reserve a slot for a request, which has a key if there are keys.

        Raises:
            ApiError: 429 without a free slot or beyond the key's shares, 503 while no model accepts requests.
        """
        _ = self._service.ready_model
        return SlotReservation(self._service.slots, key)

    @property
    def is_loading(self) -> bool:
        """Whether the model is not loaded yet."""
        return self._service.state == "loading"

    async def read(self, num_bytes: int, function: Callable[..., Result], *args: Any) -> Result:
        """As `Service.read`."""
        return await self._service.read(num_bytes, function, *args)

    @property
    def body_memory(self) -> BodyMemory:
        """Memory for bodies, over all protocols."""
        return self._service.body_memory

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
        if path not in self._native_paths or len(body) > LARGE_BYTES:  # refusing one costs less than parsing it
            return error_body(error, path)
        try:
            data = parse(body)
        except ApiError:
            return error.body()
        return native.error_body_for(error, data) if native.is_native(data) else error.body()
