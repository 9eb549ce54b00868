"""The gate: what every HTTP request passes before anything else looks at it, as raw ASGI.

In this order: an id, the key, the body's type and size, and then the routes, which are cancelled when the client goes
away. A route is open only if its exact path is listed here: whatever spelling leads elsewhere needs the key.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from inferplane.serving.errors import ApiError, internal
from inferplane.serving.http.fast_path import AdmissionFastPath
from inferplane.serving.http.protocol import MAX_HEADER_BYTES
from inferplane.serving.rendering import compact
from inferplane.serving.settings import ServerSettings
from inferplane.serving.slots import SlotReservation
from inferplane.serving.wire import ID_PATTERN

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset(("/health", "/v2/health/live", "/v2/health/ready"))
"""Paths that need no key."""
PROBED = OPEN | {"/metrics"}
"""Paths that machines ask for again and again; what went well there is no news."""
PAGE = frozenset(("/status", "/status/page.css", "/status/page.js", "/status/data", "/status/kernels", "/metrics"))
"""Paths that a browser may read with a key as its password."""
FACTS = "inferplane.facts"
"""Where in a scope routes put what the log shall tell of a request."""
REQUEST_ID = "inferplane.request_id"
TENANT = "inferplane.tenant"
"""Where in a scope the name stands under which cached prefixes are shared: one for each key."""
BODY = "inferplane.body"
"""Where in a scope the `Body` of an answer stands."""
RESERVED = "inferplane.reserved"
"""Where in a scope the place stands that was taken for a request."""
FOLLOWED = "inferplane.followed"
"""Where in a scope it stands that a span follows the request, if spans are wanted."""
MAX_REFUSED_BODY_BYTES = 64 * 1024
"""A larger body is not waited for when the request is refused anyway."""
MAX_HELD_BYTES = 256 * 2**20
"""Bytes of all bodies that are being read or served."""
SWEEP_S = 1.0
log = logging.getLogger("inferplane.serving.access")


class Keys:
    """Keys that clients may send; none: everybody is welcome. Takes as long for a wrong key as for a right one."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, headers: Iterable[tuple[bytes, bytes]], *, browser: bool = False) -> bool:
        """Whether exactly one Authorization header is there, with one of the keys; from a browser, as a password."""
        found = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = found[0].partition(b" ") if len(found) == 1 else (b"", b"", b"")
        if browser and scheme.lower() == b"basic":
            scheme, key = b"bearer", _password(key)
        digest = hashlib.sha256(key.strip()).digest()
        right = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(right) and scheme.lower() == b"bearer"

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """A name for whoever sends these headers; nobody's cached prefixes can be felt out with another key."""
        if not self._digests:
            return ""
        return hashlib.sha256(b"\n".join(v for name, v in headers if name == b"authorization")).hexdigest()[:16]


def _password(encoded: bytes) -> bytes:
    """What stands behind the colon in a Basic header."""
    try:
        return base64.b64decode(encoded.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


class Gate:
    """See above.

    Args:
        app: the routes.
        settings: limits.
        keys: who may come in.
        door: to the routes that generate.
    """

    def __init__(self, app: App, settings: ServerSettings, keys: Keys, door: AdmissionFastPath) -> None:
        self._app, self._settings, self._keys, self._door = app, settings, keys, door
        self.held_bytes = 0
        self._sending: dict[int, tuple[float, Callable[[], None]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        passage = _Passage(self, scope, receive, send)
        try:
            await passage.run()
        finally:
            passage.tell()
            self.held_bytes -= passage._held_bytes
            if passage._reserved is not None:
                passage._reserved.release()

    async def sweep(self) -> None:
        """Cut off clients that leave their answer unread for too long; runs as long as the server."""
        while True:
            await asyncio.sleep(SWEEP_S)
            limit = time.monotonic() - self._settings.write_timeout_s
            for since, cut_off in list(self._sending.values()):
                if since < limit:
                    cut_off()


class Body:
    """The body of an answer whose head was sent, piece by piece.

    A piece goes to the client's connection as one chunk of HTTP/1.1: frameworks and parser in between have nothing to
    add to it, and would take longer than making it did. Where the client is behind, they know how to wait for it.

    Args:
        send: the long way.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.transport: asyncio.Transport | None = None  # where chunks may be written to

    @property
    def ready(self) -> bool:
        """Whether `write` may be called: the client's connection has taken all that was sent."""
        transport = self.transport
        return transport is not None and not transport.get_write_buffer_size() and not transport.is_closing()

    def write(self, data: bytes) -> None:
        """A piece, more to come; only while `ready`."""
        assert self.transport is not None
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def send(self, data: bytes) -> None:
        """A piece, more to come; waits for a client that is behind."""
        if self.ready:
            self.write(data)
        else:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})


class _Passage:
    """One request on its way through the gate, in the task that its connection has made for it."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate, self._scope, self._receive, self._send = gate, scope, receive, send
        self._began = time.monotonic()
        self._status: int | None = None
        self._complete = False
        self._gone = self._late = False
        self._task = asyncio.current_task()
        self._held_bytes = 0
        self._reserved: SlotReservation | None = None
        self._body = Body(self._counted_send)
        asked = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
        ok = len(asked) == 1 and re.match(ID_PATTERN, asked[0]) is not None
        self._id = asked[0] if ok else uuid.uuid4().hex
        scope[REQUEST_ID], scope[FACTS], scope[BODY] = self._id, {}, self._body
        scope[TENANT] = gate._keys.tenant(scope["headers"])

    async def run(self) -> None:
        gate = self._gate
        try:
            page = self._scope["path"] in PAGE
            if gate._keys and not self._is_open() and not gate._keys.admit(self._scope["headers"], browser=page):
                raise ApiError(401, "The key is missing or wrong.", code="invalid_api_key")
            self._check_head()
            self._check_type()
            if self._leads() and self._declared() > MAX_REFUSED_BODY_BYTES:
                gate._door.enter().release()
            body = await self._whole_body()
        except ApiError as error:
            self._count(error)
            await self._refuse(error)
            return
        if body is not None and await self._reserve(body):
            await self._pass_on(body)

    async def _reserve(self, body: bytes) -> bool:
        """Whether there is a place for what generates; if not, it is refused here."""
        if not self._leads():
            return True
        door = self._gate._door
        try:
            self._scope[RESERVED] = self._reserved = door.enter()
        except ApiError as error:
            self._count(error)
            await self._refuse(error, door.words(error, self._scope["path"], body), close=False)
            return False
        return True

    def _count(self, error: ApiError) -> None:
        self._scope[FACTS]["error"] = error.code
        self._gate._door.refused(error)

    def _leads(self) -> bool:
        return self._gate._door.leads(self._scope["method"], self._scope["path"])

    def _is_open(self) -> bool:
        path = self._scope["path"]
        return path in OPEN and self._scope.get("raw_path", path.encode()) == path.encode()

    def tell(self) -> None:
        """Log what became of the request."""
        took_ms = round(1000 * (time.monotonic() - self._began), 1)
        facts = {"method": self._scope["method"], "path": self._scope["path"], "status": self._status, "ms": took_ms}
        ended = {} if self._complete else {"ended": "client left" if self._gone else "cut off"}
        everything = {"request_id": self._id, **facts, **ended, **self._scope[FACTS]}
        probe = self._status == 200 and self._scope["path"] in PROBED
        log.log(logging.DEBUG if probe else logging.INFO, "request", extra={"facts": everything})
        if self._status is not None and self._status >= 400 and not self._scope.get(FOLLOWED):
            why = str(self._scope[FACTS].get("error", self._status))
            self._gate._door.trace(self._scope, self._status, why, took_ms / 1000)

    # -- the body

    def _header(self, wanted: bytes) -> list[bytes]:
        return [value for name, value in self._scope["headers"] if name == wanted]

    def _check_head(self) -> None:
        """What the parser lets through: any version, and headers of any size if they come in one piece."""
        if self._scope.get("http_version", "1.1") not in ("1.0", "1.1"):
            raise ApiError(400, "This is neither HTTP/1.1 nor HTTP/1.0.", code="unsupported_version")
        size = len(self._scope.get("raw_path", b"")) + len(self._scope.get("query_string", b""))
        if size + sum(len(name) + len(value) for name, value in self._scope["headers"]) > MAX_HEADER_BYTES:
            raise ApiError(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes.", code="headers_too_large")

    def _check_type(self) -> None:
        if any(v.strip().lower() != b"identity" for v in self._header(b"content-encoding")):
            raise ApiError(415, "Compressed bodies are not accepted.", code="unsupported_encoding")
        # Any web page can make a browser post forms and text, without asking; JSON it cannot.
        kinds = self._header(b"content-type")
        lengths = self._header(b"content-length")
        empty = not self._header(b"transfer-encoding") and lengths in ([], [b"0"])
        if self._scope["method"] == "POST" and not empty:
            kind = kinds[0].partition(b";")[0].strip().lower() if len(kinds) == 1 else b""
            if kind != b"application/json":
                raise ApiError(415, "The body has to be sent as application/json.", code="unsupported_media_type")

    def _declared(self) -> int:
        """The body's length as its headers state it; 0 where they do not."""
        found = self._header(b"content-length")
        return int(found[0]) if found and found[0].isdigit() else 0

    async def _whole_body(self) -> bytes | None:
        """All of it, counted while it comes; None when the client left meanwhile."""
        most = self._gate._settings.max_body_bytes
        if self._declared() > most:
            raise ApiError(413, f"The body is larger than {most} bytes.", code="body_too_large")
        limit = asyncio.get_running_loop().call_later(self._gate._settings.body_timeout_s, self._too_late)
        try:
            return await self._read(most)
        except asyncio.CancelledError:
            if not self._late:
                raise
            raise ApiError(408, "The body did not arrive in time.", code="body_timeout") from None
        finally:
            limit.cancel()

    def _too_late(self) -> None:
        self._late = True
        self._end()

    async def _read(self, most: int) -> bytes | None:
        body, gate = bytearray(), self._gate
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._gone = True
                return None
            piece = message.get("body", b"")
            body += piece
            self._held_bytes += len(piece)
            gate.held_bytes += len(piece)
            if gate.held_bytes > MAX_HELD_BYTES:
                raise ApiError(503, "Too many large bodies at a time.", code="busy", retry_after_s=1)
            if len(body) > most:
                raise ApiError(413, f"The body is larger than {most} bytes.", code="body_too_large")
            if not message.get("more_body", False):
                return bytes(body)

    # -- beyond the gate

    async def _pass_on(self, body: bytes) -> None:
        """Run the routes until they are done or the client has gone."""
        given = False

        async def receive() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()  # whoever waits for the client to go is cancelled when it does
            raise AssertionError("unreachable")

        scope = self._scope
        if scope["method"] == "HEAD":  # as GET; the connection sends no body
            scope = {**scope, "method": "GET"}
        failed: Exception | None = None
        when_lost = scope.get("state", {}).get("when_lost")
        forget = when_lost(self._left) if when_lost is not None else None
        try:
            if self._reserved is not None:
                await self._gate._door.turns.mine()
            await self._gate._app(scope, receive, self._counted_send)
        except asyncio.CancelledError:
            if not self._gone:
                raise
        except Exception as error:
            failed = error
        finally:
            if forget is not None:
                forget()
        if failed is not None:
            log.error("a route failed", exc_info=failed, extra={"facts": {"request_id": self._id}})
            if self._status is None:
                await self._refuse(internal())
            elif not self._complete:
                raise failed

    def _left(self) -> None:
        if not self._complete:
            self._gone = True
            self._end()

    def _end(self) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _counted_send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            whole = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if self._scope.get("http_version") == "1.1" and not whole:  # then the body is sent in chunks
                self._body.transport = self._scope.get("state", {}).get("transport")
            headers = [*message.get("headers", ()), (b"x-request-id", self._id.encode())]
            message = {**message, "headers": headers}
        cut_off = self._scope.get("state", {}).get("cut_off")
        if cut_off is not None:
            self._gate._sending[id(self)] = (time.monotonic(), cut_off)
        try:
            await self._send(message)
        finally:
            self._gate._sending.pop(id(self), None)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True

    async def _refuse(self, error: ApiError, words: Mapping[str, Any] | None = None, *, close: bool = True) -> None:
        """Answer, and close the connection where something of the body is left: it is not read."""
        data = compact(words or error.body())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        if close:
            headers.append((b"connection", b"close"))
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
            if self._scope["path"] in PAGE:
                headers.append((b"www-authenticate", b'Basic realm="Inferplane: the password is a key"'))
        await self._counted_send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._counted_send({"type": "http.response.body", "body": data})
