"""Sends requests over HTTP/1.1 and passes on each piece of an answer's stream in the pass of the loop that read it.

h11 writes requests and reads the heads of answers and their bodies, except for the chunks of a stream
(`event_stream.ChunkedBody`). Connections are reused; no proxy and no redirect is followed, so that what is measured is
the server at the URL.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import h11

from inferplane.cli.verbs.bench.serve.address import ServerAddress
from inferplane.cli.verbs.bench.serve.event_stream import ChunkedBody, StreamError

MAX_BODY_BYTES = 2**20
"""Most bytes that are stored of a body that is no stream."""
UNREADABLE = (h11.ProtocolError, UnicodeError, RecursionError, OverflowError)
"""What reading a server's bytes may raise."""
OnData = Callable[[bytes, float], None]
"""Takes a piece of a stream, and when it arrived."""


class NoAnswerError(Exception):
    """The connection could not be made, or was closed before an answer began."""


@dataclass(frozen=True)
class HttpAnswer:
    """An answer that has ended.

    Args:
        status: of HTTP.
        headers: names in lower case.
        body: of an answer that is no stream, at most 1 MiB of it.
    """

    status: int
    headers: dict[str, str]
    body: bytes


class _HttpConnection(asyncio.Protocol):
    """One connection, which has at most one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_open = self.is_reusable = False
        self.speaks_first = False
        self.num_requests = 0
        self.has_answered = False
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.is_open = transport, True

    def send(
        self, request: h11.Request, body: bytes, on_data: OnData | None, limit_s: float
    ) -> asyncio.Future[HttpAnswer]:
        """Send a request; the future has its answer, or why there is none."""
        if self.speaks_first or not self.is_open:
            what = "sent something" if self.speaks_first else "closed the connection"
            raise NoAnswerError(f"the server {what} before a request was sent")
        assert self.transport is not None
        self._parser = h11.Connection(h11.CLIENT)
        head = self._parser.send(request) or b""
        content = self._parser.send(h11.Data(body)) or b"" if body else b""
        end = self._parser.send(h11.EndOfMessage()) or b""
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        self._limit = loop.call_later(limit_s, self._fail, TimeoutError())
        self._chunks: ChunkedBody | None = None
        self._head: h11.Response | None = None
        self._content: list[bytes] = []
        self._num_bytes = 0
        self._on_data, self.has_answered, self.is_reusable = on_data, False, False
        self.num_requests += 1
        self.transport.write(head + content + end)
        return self._answer

    def disconnect(self) -> None:
        """Close the connection at once."""
        self.is_open = False
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._answer is None or self._answer.done():
            self.speaks_first = True
            self.disconnect()
            return
        self.has_answered = True
        try:
            if self._chunks is None:
                self._parser.receive_data(data)
                self._read_events(now)
            else:
                self._read_chunks(data, now)
        except UNREADABLE as error:
            self._fail(StreamError(f"the answer is no HTTP: {error}"))
        except StreamError as error:
            self._fail(error)

    def _read_chunks(self, data: bytes, now: float) -> None:
        assert self._chunks is not None and self._on_data is not None and self._head is not None
        content = self._chunks.feed(data)
        if content:
            self._on_data(content, now)
        if self._chunks.complete:
            is_last = any(name == b"connection" and b"close" in value.lower() for name, value in self._head.headers)
            self._end(reusable=not is_last)

    def _read_events(self, now: float) -> None:
        while True:
            event = self._parser.next_event()
            if isinstance(event, h11.Response):
                self._head = event
                is_chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
                if event.status_code == 200 and self._on_data is not None and is_chunked:
                    self._chunks = ChunkedBody()
                    self._read_chunks(self._parser.trailing_data[0], now)
                    return
            elif isinstance(event, h11.Data):
                self._store(bytes(event.data), now)
            elif isinstance(event, h11.EndOfMessage):
                self._end(reusable=self._parser.our_state is h11.DONE and self._parser.their_state is h11.DONE)
                return
            elif event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return

    def _store(self, data: bytes, now: float) -> None:
        assert self._head is not None
        if self._head.status_code == 200 and self._on_data is not None:
            self._on_data(data, now)
        if self._num_bytes < MAX_BODY_BYTES:
            self._content.append(data[: MAX_BODY_BYTES - self._num_bytes])
            self._num_bytes += len(data)

    def _end(self, *, reusable: bool) -> None:
        assert self._head is not None and self._answer is not None
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._head.headers}
        self.is_reusable = reusable and self.is_open
        self._clear_limit()
        if not self._answer.done():
            self._answer.set_result(HttpAnswer(self._head.status_code, headers, b"".join(self._content)))
        if not self.is_reusable:
            self.disconnect()

    def _fail(self, error: Exception) -> None:
        self._clear_limit()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.disconnect()

    def _clear_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = self.is_reusable = False
        if self._answer is None or self._answer.done():
            return
        why = f": {error}" if error is not None else ""
        if not self.has_answered:
            self._fail(NoAnswerError(f"the server closed the connection without an answer{why}"))
        elif self._chunks is not None or error is not None:
            self._fail(StreamError(f"the connection was closed in the middle of the answer{why}"))
        else:
            try:
                self._parser.receive_data(b"")  # a body without a length ends with its connection
                self._read_events(time.perf_counter())
            except StreamError as failure:
                self._fail(failure)
            except UNREADABLE:
                pass
            self._fail(StreamError("the connection was closed in the middle of the answer"))


class HttpClient:
    """A client of one server.

    Args:
        address: the server's.
        headers: of every request, beside those that HTTP itself needs.
        tls: checks the server's certificate; None without TLS.

    Attributes: `opened` (connections), `resent` (requests that were sent again, since the server closed a connection
    that had served another one before it answered).
    """

    def __init__(self, address: ServerAddress, headers: Sequence[tuple[str, str]], tls: ssl.SSLContext | None) -> None:
        self.address = address
        self.opened = self.resent = 0
        self._headers, self._tls = list(headers), tls
        self._idle: list[_HttpConnection] = []
        self._busy: set[_HttpConnection] = set()

    async def get(self, path: str, limit_s: float) -> HttpAnswer:
        """Return the answer to a GET; errors as those of `send_json`."""
        return await self._send("GET", path, b"", None, limit_s)

    async def send_json(self, path: str, body: bytes, on_data: OnData, limit_s: float) -> HttpAnswer:
        """Post JSON, and pass on the pieces of a stream as they arrive.

        Args:
            path: behind the address's prefix.
            body: JSON.
            on_data: takes the body of an answer with status 200, piece by piece; its `StreamError` ends the request.
            limit_s: seconds for everything, from connecting to the end of the answer.

        Raises:
            NoAnswerError: the connection failed, or was closed before an answer.
            StreamError: the answer is not valid, or did not end.
            TimeoutError: it took longer than the limit.
        """
        return await self._send("POST", path, body, on_data, limit_s)

    async def _send(self, method: str, path: str, body: bytes, on_data: OnData | None, limit_s: float) -> HttpAnswer:
        headers = [("Host", self.address.authority), ("Accept-Encoding", "identity"), *self._headers]
        if method == "POST":
            headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        try:
            request = h11.Request(method=method, target=f"{self.address.prefix}{path}", headers=headers)
        except h11.LocalProtocolError as error:
            raise NoAnswerError(f"the request is no HTTP: {error}") from error
        limit = time.perf_counter() + limit_s
        while True:
            connection = await self._connect(limit_s)
            reused = connection.num_requests > 0
            self._busy.add(connection)
            try:
                answer = await connection.send(request, body, on_data, max(0.0, limit - time.perf_counter()))
            except NoAnswerError:
                if reused and not connection.has_answered:
                    self.resent += 1
                    continue  # the server closed an idle connection just then; the request goes over a new one
                raise
            except h11.LocalProtocolError as error:
                connection.disconnect()
                raise NoAnswerError(f"the request is no HTTP: {error}") from error
            except asyncio.CancelledError:
                connection.disconnect()
                raise
            finally:
                self._busy.discard(connection)
            if connection.is_reusable:
                self._idle.append(connection)
            return answer

    async def _connect(self, limit_s: float) -> _HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        name = self.address.host if self._tls is not None else None
        opening = loop.create_connection(
            _HttpConnection, self.address.host, self.address.port, ssl=self._tls, server_hostname=name
        )
        try:
            _, connection = await asyncio.wait_for(opening, limit_s)
        except (asyncio.TimeoutError, TimeoutError):
            raise TimeoutError from None
        except ssl.SSLCertVerificationError as error:
            raise NoAnswerError(f"the server's certificate is not valid: {error.verify_message}") from error
        except ssl.SSLError as error:
            raise NoAnswerError(f"TLS failed: {error.reason or error}") from error
        except (OSError, UnicodeError) as error:
            words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise NoAnswerError(f"the connection could not be made: {words}") from error
        self.opened += 1
        return connection

    def disconnect(self) -> None:
        """Close all connections."""
        for connection in (*self._idle, *self._busy):
            connection.disconnect()
        self._idle.clear()
