"""uvicorn's HTTP/1.1 connection, with a time limit for headers, a limit of connections, and a way to close it.

Of uvicorn's two parsers this is the one on h11: it refuses what HTTP leaves ambiguous and bounds the size of headers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 32 * 1024


class ConnectionLimits(NamedTuple):
    """What a connection may do.

    Args:
        header_timeout_s: seconds for a request's headers, from the connection or from their first byte.
        max_connections: one more is closed at once.
        on_refusal: called with the reason when something is refused before it is a request.
    """

    header_timeout_s: float
    max_connections: int
    on_refusal: Callable[[str], object]


class LimitedConnection(H11Protocol):
    """A connection with limits; uvicorn makes one per client, of the class that `connection_class` returns."""

    limits: ConnectionLimits
    _header_timer: asyncio.TimerHandle | None = None
    _on_lost: Callable[[], object] | None = None
    _lost = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Routes get this with every request's scope.
        own = {"cut_off": transport.abort, "transport": transport, "when_lost": self._when_lost}
        self.app_state = {**self.app_state, **own}
        if len(self.connections) > self.limits.max_connections:
            self.limits.on_refusal("too_many_connections")
            transport.abort()
            return
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_header_timer()
        elif self._header_timer is None and not self.transport.is_closing():
            self._start_header_timer()

    def send_400_response(self, msg: str) -> None:
        self.limits.on_refusal("malformed_http")
        super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)
        self._lost = True
        if self._on_lost is not None:
            self._on_lost()

    def _when_lost(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` when the client leaves, or soon if it has left.

        Returns:
            A function that cancels this.
        """
        self._on_lost = callback
        self.flow.resume_reading()  # a large body may have paused it, and a paused connection does not see the end
        if self._lost:
            self.loop.call_soon(callback)

        def forget() -> None:
            if self._on_lost is callback:  # the connection's next request may have come before the last one was done
                self._on_lost = None

        return forget

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self.transport.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def connection_class(connection_limits: ConnectionLimits) -> type[LimitedConnection]:
    """Return the class of connections with these limits."""

    class Configured(LimitedConnection):
        limits = connection_limits

    return Configured
