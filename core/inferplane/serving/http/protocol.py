"""uvicorn's HTTP/1.1 connection, with a time limit for headers, a limit of connections, and ways to close it.

Of uvicorn's two parsers this is the one on h11, which bounds the size of headers; `framing.py` makes it refuse what
HTTP leaves ambiguous. A connection reads 64 KiB in a turn of the event loop, so that none delays the others, and
drops what follows a refusal without parsing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from inferplane.errors import sentence
from inferplane.serving.errors import ApiError, invalid
from inferplane.serving.http.framing import EVENTS_PER_PASS, StrictConnection
from inferplane.serving.rendering import encode_json

MAX_HEADER_BYTES = 32 * 1024
BYTES_PER_PASS = 64 * 1024
"""Most bytes that a connection hands to its parser in one turn of the event loop."""
MAX_DROPPED_BYTES, DROP_S = 64 * 2**20, 2.0
"""Most bytes after a refusal that are received and dropped, and most seconds that takes. The system resets a connection
that closes with bytes unread, and the client then loses the answer.
"""
MAX_REFUSED = 64
"""Most connections beyond their address's limit that are open at a time until their clients have read the refusal; as
they count as connections, at most an eighth of `max_connections`, too. Further ones are closed at once.
"""


class AddressLimit:
    """Counts the connections of each client address, up to a limit. Not for several threads.

    A client with IPv6 has a whole network of addresses, so all with the same first 64 bits count as one.

    Args:
        max_connections: most of one address at a time.
        max_refused: most that are open at a time although they are refused.
    """

    def __init__(self, max_connections: int, max_refused: int = MAX_REFUSED) -> None:
        self.max_connections = max_connections
        self._max_refused = max_refused
        self._open: Counter[str] = Counter()
        self._refused = 0

    def acquire(self, address: str) -> Callable[[], None] | None:
        """Count a connection; return what its end has to call, or None if the address has as many as it may."""
        name = address_group(address)
        if self._open[name] >= self.max_connections:
            return None
        self._open[name] += 1

        def release() -> None:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]

        return release

    def acquire_refused(self) -> Callable[[], None] | None:
        """Count a connection that is refused; return what its end has to call, or None if it has to end at once."""
        if self._refused >= self._max_refused:
            return None
        self._refused += 1

        def release() -> None:
            self._refused -= 1

        return release


@lru_cache(1024)
def address_group(address: str) -> str:
    """Return what addresses of one client have in common."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))


class ConnectionLimits(NamedTuple):
    """What a connection may do.

    Args:
        header_timeout_s: seconds for a request's headers, from the connection or from their first byte.
        max_connections: one more is closed at once.
        on_refusal: called with the reason when something is refused before it is a request.
        per_address: of the connections that share this; None: no such limit.
    """

    header_timeout_s: float
    max_connections: int
    on_refusal: Callable[[str], object]
    per_address: AddressLimit | None = None


class _Flow(FlowControl):
    """Tells its connection when uvicorn wants to read on: bytes may wait that were received before."""

    def __init__(self, transport: asyncio.Transport, on_resume: Callable[[], object]) -> None:
        super().__init__(transport)
        self._on_resume = on_resume

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._on_resume()


class LimitedConnection(H11Protocol):
    """A connection with limits; uvicorn makes one per client, of the class that `connection_class` returns."""

    limits: ConnectionLimits
    conn: StrictConnection
    _header_timer: asyncio.TimerHandle | None = None
    _on_lost: Callable[[], object] | None = None
    _release_address: Callable[[], None] | None = None
    _lost = False
    _next_read: asyncio.Handle | None = None
    """The next turn of the event loop in which this connection reads on."""
    _dropped: asyncio.Future[None] | None = None
    """Set once what is received is dropped; done when no more comes."""
    _dropped_bytes = 0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.conn = StrictConnection(h11.SERVER, self.config.h11_max_incomplete_event_size or MAX_HEADER_BYTES)
        self._unread = bytearray()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport, self._read_on)
        # Routes get this with every request's scope.
        self.app_state = {
            **self.app_state,
            "cut_off": transport.abort,
            "transport": transport,
            "when_lost": self._when_lost,
            "drop_rest": self.drop_rest,
            "rest_dropped": self.rest_dropped,
        }
        if len(self.connections) > self.limits.max_connections:
            self.limits.on_refusal("too_many_connections")
            transport.abort()
        elif self._is_within_address_limit():
            self._start_header_timer()

    def _is_within_address_limit(self) -> bool:
        """Count this connection for its address; answer and close it if the address has too many."""
        limit = self.limits.per_address
        if limit is None or self.client is None:
            return True
        self._release_address = limit.acquire(self.client[0])
        if self._release_address is not None:
            return True
        code = "too_many_connections"
        self.limits.on_refusal(code)
        self._release_address = limit.acquire_refused()
        if self._release_address is None:
            self.transport.abort()
            return False
        message = f"{limit.max_connections} connections of {self.client[0]} are open, the most of one address."
        self._answer_and_close(ApiError(503, message, code=code, retry_after_s=1))
        return False

    def data_received(self, data: bytes) -> None:
        if self._dropped is not None:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > MAX_DROPPED_BYTES and not self._dropped.done():
                self._dropped.set_result(None)
            return
        self._unread += data
        if self._next_read is None and not self.flow.read_paused:
            self._read()
        elif self._unread:
            self.transport.pause_reading()

    def handle_events(self) -> None:
        self.conn.events_left = EVENTS_PER_PASS
        super().handle_events()
        if self.conn.events_left <= 0:
            self._read_on()

    def _read(self) -> None:
        """Hand some of the received bytes to the parser; the rest waits for the next turn."""
        self._next_read = None
        if self._dropped is not None or self._lost or self.transport.is_closing():
            return
        if self.conn.events_left <= 0:
            self.handle_events()
        elif self._unread:
            piece = bytes(self._unread[:BYTES_PER_PASS])
            del self._unread[:BYTES_PER_PASS]
            super().data_received(piece)
        if self.conn.their_state is not h11.IDLE:
            self._stop_header_timer()
        elif self._header_timer is None and not self.transport.is_closing():
            self._start_header_timer()
        if not self.flow.read_paused:
            self._read_on()

    def _read_on(self) -> None:
        """Read on in the next turn what has been received; if that is nothing, let the transport read."""
        if self._next_read is not None:
            return
        if self._dropped is None and (self._unread or self.conn.events_left <= 0):
            self.transport.pause_reading()
            self._next_read = self.loop.call_soon(self._read)
        else:
            self.transport.resume_reading()

    def drop_rest(self) -> None:
        """Drop what the client sends from now on, without parsing it. The connection can only be closed after that."""
        if self._dropped is not None:
            return
        self._dropped = self.loop.create_future()
        if self._lost or (self.conn.their_state in (h11.DONE, h11.MUST_CLOSE) and not self._unread):
            self._dropped.set_result(None)
        self._unread.clear()
        self.flow.read_paused = False
        self.transport.resume_reading()

    async def rest_dropped(self) -> None:
        """Tell the client that nothing follows the answer, and wait, not for long, until it has sent all it sends."""
        assert self._dropped is not None
        self._end_writing()
        await asyncio.wait([self._dropped], timeout=DROP_S)

    def _end_writing(self) -> None:
        """Let the client read the end of the answer while this side still receives; TLS has no such half close."""
        transport = self.transport
        if transport.get_extra_info("sslcontext") is None and not transport.get_write_buffer_size():
            with contextlib.suppress(OSError):
                transport.get_extra_info("socket").shutdown(socket.SHUT_WR)

    def eof_received(self) -> None:
        if self._dropped is not None and not self._dropped.done():
            self._dropped.set_result(None)

    def send_400_response(self, msg: str) -> None:
        self.limits.on_refusal(self.conn.code)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun, and another would end it
            self.transport.close()
            return
        reason = sentence(f"The message cannot be read as HTTP: {self.conn.refusal or msg}")
        self._answer_and_close(invalid(reason, None, self.conn.code))

    def _answer_and_close(self, error: ApiError) -> None:
        """Answer with an error that belongs to no request of a route, and close the connection once it is read."""
        data = encode_json(error.body())
        headers = [("content-type", "application/json"), ("content-length", str(len(data))), ("connection", "close")]
        if error.retry_after_s is not None:
            headers.append(("retry-after", str(error.retry_after_s)))
        reason = HTTPStatus(error.status).phrase.encode()
        response = h11.Response(status_code=error.status, reason=reason, headers=headers)
        for event in (response, h11.Data(data=data), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.drop_rest()
        closing = self.loop.create_task(self.rest_dropped())
        closing.add_done_callback(lambda _: self.transport.close())
        self.tasks.add(closing)
        closing.add_done_callback(self.tasks.discard)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)
        self._lost = True
        self._unread.clear()
        self.eof_received()
        if self._release_address is not None:
            self._release_address()
            self._release_address = None
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
