"""uvicorn's HTTP/1.1 connection, with a limit on how long headers may take, and with a way to cut it off.

Of uvicorn's parsers this is the one on h11: it refuses what HTTP leaves ambiguous and bounds the size of headers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_HEADER_BYTES = 32 * 1024


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

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # Routes get this with every request's scope.
            self.app_state = {**self.app_state, "cut_off": transport.abort, "transport": transport}
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

        def _wait_for_headers(self) -> None:
            self._patience = self.loop.call_later(header_timeout_s, self.transport.abort)

        def _stop_waiting(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return Connection
