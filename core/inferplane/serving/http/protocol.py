"""uvicorn's HTTP/1.1 connection, with a limit on how long headers may take, and with a way to cut it off.

Of uvicorn's parsers this is the one on h11: it refuses what HTTP leaves ambiguous and bounds the size of headers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 32 * 1024


def connection_class(
    header_timeout_s: float, max_connections: int, refused: Callable[[str], object]
) -> type[H11Protocol]:
    """The class of connections with these limits.

    Args:
        header_timeout_s: seconds for a request's headers, from the connection or from their first byte.
        max_connections: one more is closed at once.
        refused: told why, in a word, when something is refused before it is a request.
    """

    class Connection(H11Protocol):
        _patience: asyncio.TimerHandle | None = None
        _left: Callable[[], object] | None = None
        _lost = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # Routes get this with every request's scope.
            own = {"cut_off": transport.abort, "transport": transport, "when_lost": self._when_lost}
            self.app_state = {**self.app_state, **own}
            if len(self.connections) > max_connections:
                refused("too_many_connections")
                transport.abort()
                return
            self._wait_for_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_waiting()
            elif self._patience is None and not self.transport.is_closing():
                self._wait_for_headers()

        def send_400_response(self, msg: str) -> None:
            refused("malformed_http")
            super().send_400_response(msg)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)
            self._lost = True
            if self._left is not None:
                self._left()

        def _when_lost(self, left: Callable[[], object]) -> Callable[[], None]:
            """Have this called when the client leaves, soon if it has left, until what is returned is called."""
            self._left = left
            self.flow.resume_reading()  # a large body may have paused it, and who does not read hears of nothing
            if self._lost:
                self.loop.call_soon(left)

            def forget() -> None:
                if self._left is left:  # the connection's next request may have come before the last one was done
                    self._left = None

            return forget

        def _wait_for_headers(self) -> None:
            self._patience = self.loop.call_later(header_timeout_s, self.transport.abort)

        def _stop_waiting(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return Connection
