"""The gate: what every HTTP request passes before a route runs, as raw ASGI.

In this order: an id, the key, type and size of the body, a slot if it generates. Then the route runs, and is cancelled
when the client leaves. A path needs no key only if it is listed here exactly: any other spelling needs one.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from inferplane.engine.clients.process.memory import memory_trimmer
from inferplane.serving.bodies import LARGE_BYTES, object_bytes
from inferplane.serving.errors import ApiError, internal
from inferplane.serving.http.body_checks import READ
from inferplane.serving.http.chunks import ChunkWriter
from inferplane.serving.http.fast_path import AdmissionFastPath, LoopPassLimiter
from inferplane.serving.http.protocol import MAX_HEADER_BYTES, address_group
from inferplane.serving.http.scope import CONTEXT, App, Message, Receive, RequestContext, Scope, Send
from inferplane.serving.keys import AccessKey, Keys, host_check
from inferplane.serving.kserve.names import check_path, error_body, find_json_length, is_infer_path
from inferplane.serving.rendering import encode_json
from inferplane.serving.settings import ServerSettings
from inferplane.serving.wire import ID_PATTERN

OPEN = frozenset(("/health", "/v2/health/live", "/v2/health/ready"))
"""Paths that need no key."""
PROBED = OPEN | {"/metrics"}
"""Paths that monitoring polls: their successful answers, and "loading", are logged at debug level only."""
PAGE = frozenset(("/status", "/status/page.css", "/status/page.js", "/status/data", "/status/kernels", "/metrics"))
"""Paths that a browser may read with a key as its password."""
MAX_REFUSED_BODY_BYTES = 64 * 1024
"""If no slot is free, a larger body is refused without waiting for it."""
TRIMMED_BYTES, TRIMMED_AT_REST_BYTES = 32 * 2**20, 2**20
"""Memory is given back to the system once that much was freed, and less is held; and when nothing is held."""
SWEEP_S = 1.0
BEGUN_PER_PASS, PROBES_PER_PASS, ROUTED_PER_PASS = 16, 2, 1
"""Most requests that begin, probes of health that begin, and requests that enter a route which does not generate, in
one pass of the event loop. Beginning takes up to a millisecond, refusals included, and such a route up to 20: a hundred
connections would otherwise hold up the loop for 0.2 s, pass after pass. Probes do not wait behind other requests, and
refusals hardly behind accepted ones, which take longer and of which one enters its route per pass.
"""
log = logging.getLogger("inferplane.serving.access")


class Gate:
    """Checks each request, passes it to the routes, and logs what became of it.

    Args:
        app: the routes.
        settings: limits.
        keys: which clients may call.
        fast_path: reserves slots for requests that generate.
        body_paths: paths whose POST takes a body; no other request's body is read.
    """

    def __init__(
        self,
        app: App,
        settings: ServerSettings,
        keys: Keys,
        fast_path: AdmissionFastPath,
        body_paths: Collection[str],
    ) -> None:
        self.app, self.settings, self.keys, self.fast_path = app, settings, keys, fast_path
        self.body_paths = frozenset(body_paths)
        self.is_allowed_host = host_check(settings, has_keys=bool(keys))
        self.memory = fast_path.body_memory
        self.beginning, self.probing = LoopPassLimiter(BEGUN_PER_PASS), LoopPassLimiter(PROBES_PER_PASS)
        self.generating = LoopPassLimiter(after=self.beginning)
        self.routing = LoopPassLimiter(ROUTED_PER_PASS)
        self.sends: dict[int, tuple[float, Callable[[], None]]] = {}
        """Sends that wait for a client, by request: when each began, and what closes its connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        key = self.keys.find(scope["headers"], browser=scope["path"] in PAGE)
        address = scope.get("client")
        client = key.name if key is not None else address_group(address[0]) if address else ""
        await (self.probing if scope["path"] in OPEN else self.beginning).wait(client)
        request = GatedRequest(self, scope, receive, send, key, client)
        try:
            await request.run()
        finally:
            request.finish()

    async def sweep(self) -> None:
        """Close connections of clients that leave their answer unread for too long, and give memory of ended requests
        back; runs as long as the server.
        """
        trim = memory_trimmer()
        while True:
            await asyncio.sleep(SWEEP_S)
            oldest = time.monotonic() - self.settings.write_timeout_s
            for since, close in list(self.sends.values()):
                if since < oldest:
                    close()
            least = TRIMMED_BYTES if self.memory.held_bytes else TRIMMED_AT_REST_BYTES
            if self.memory.held_bytes < TRIMMED_BYTES and self.memory.freed_bytes >= least:
                self.memory.freed_bytes = 0
                await asyncio.to_thread(trim)


class GatedRequest:
    """One request in the gate, in the task that its connection started.

    Args:
        gate: the server's gate.
        scope: of ASGI, as are `receive` and `send`.
        receive: see above.
        send: see above.
        key: the key that the client sent.
        client: the key's name, or the address of a client without one: with whom it takes turns.
    """

    def __init__(
        self, gate: Gate, scope: Scope, receive: Receive, send: Send, key: AccessKey | None, client: str
    ) -> None:
        self._gate, self._scope, self._receive, self._send = gate, scope, receive, send
        self._client = client
        self._started = time.monotonic()
        self._status: int | None = None
        self._complete = False
        self._client_left = self._body_late = False
        self._task = asyncio.current_task()
        self._held = gate.memory.hold()
        self._drops_rest = False
        """Whether the rest of the request is dropped, and the connection closed after the answer."""
        sent_ids = [value.decode("latin-1") for value in self._header(b"x-request-id")]
        valid = len(sent_ids) == 1 and re.match(ID_PATTERN, sent_ids[0]) is not None
        request_id = sent_ids[0] if valid else uuid.uuid4().hex
        self._context = scope[CONTEXT] = RequestContext(
            request_id, ChunkWriter(self._send_watched), key, held=self._held
        )
        if key is not None:
            self._context.facts["key"] = key.name

    async def run(self) -> None:
        """Check the request, reserve a slot if it generates, and answer it."""
        gate, scope = self._gate, self._scope
        generates = gate.fast_path.applies_to(scope["method"], scope["path"])
        body = None
        try:
            self._check_host()
            if gate.keys and self._context.key is None and not self._is_open():
                raise ApiError(401, "The key is missing or wrong.", code="invalid_api_key")
            self._check_head()
            check_path(scope["path"])
            takes_body = scope["path"] in gate.body_paths or is_infer_path(scope["path"])
            if scope["method"] != "POST" or not takes_body:
                body = b""
                if self._has_body():
                    self._drop_rest()
            else:
                self._check_type()
                if generates and self._read_length() > MAX_REFUSED_BODY_BYTES:
                    gate.fast_path.reserve(self._context.key).release()
                body = await self._read_body()
                if body is None:
                    return
            if generates:
                self._context.reservation = gate.fast_path.reserve(self._context.key)
        except ApiError as error:
            self._context.facts["error"] = error.code
            gate.fast_path.count_refusal(error)
            shown = None if body is None else gate.fast_path.error_body(error, scope["path"], body)
            if body is None:
                self._drop_rest()
            await self._refuse(error, shown)
            return
        await self._run_route(body)

    def finish(self) -> None:
        """Log what became of the request, and release what it holds."""
        scope, context = self._scope, self._context
        took_ms = round(1000 * (time.monotonic() - self._started), 1)
        facts = {"method": scope["method"], "path": scope["path"], "status": self._status, "ms": took_ms}
        ended = {} if self._complete else {"ended": "client left" if self._client_left else "cut off"}
        early = self._status == 503 and scope["path"] in OPEN and self._gate.fast_path.is_loading
        probe = early or (self._status == 200 and scope["path"] in PROBED)
        shown = {"request_id": context.request_id, **facts, **ended, **context.facts}
        log.log(logging.DEBUG if probe else logging.INFO, "request", extra={"facts": shown})
        if self._status is not None and self._status >= 400 and not context.is_traced:
            reason = str(context.facts.get("error", self._status))
            self._gate.fast_path.trace_refusal(scope, self._status, reason, took_ms / 1000)
        self._held.release()
        if context.reservation is not None:
            context.reservation.release()

    # -- the head

    def _is_open(self) -> bool:
        path = self._scope["path"]
        return path in OPEN and self._scope.get("raw_path", path.encode()) == path.encode()

    def _header(self, header: bytes) -> list[bytes]:
        return [value for name, value in self._scope["headers"] if name == header]

    def _check_host(self) -> None:
        is_allowed = self._gate.is_allowed_host
        host = b"".join(self._header(b"host")).decode("latin-1")
        if is_allowed is not None and not is_allowed(host):
            raise ApiError(
                403,
                f"{host[:100]!r} is no name of this server: use localhost, or start it with --allowed-hosts NAME.",
                code="unknown_host",
            )

    def _check_head(self) -> None:
        """Refuse what the parser accepts: any version, and headers of any size if they arrive in one piece."""
        if self._scope.get("http_version", "1.1") not in ("1.0", "1.1"):
            raise ApiError(400, "This is neither HTTP/1.1 nor HTTP/1.0.", code="unsupported_version")
        size = len(self._scope.get("raw_path", b"")) + len(self._scope.get("query_string", b""))
        if size + sum(len(name) + len(value) for name, value in self._scope["headers"]) > MAX_HEADER_BYTES:
            raise ApiError(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes.", code="headers_too_large")

    def _check_type(self) -> None:
        if any(v.strip().lower() != b"identity" for v in self._header(b"content-encoding")):
            raise ApiError(415, "Compressed bodies are not accepted.", code="unsupported_encoding")
        # Any web page can make a browser post forms and text without asking; it cannot do so with JSON.
        kinds = self._header(b"content-type")
        if self._has_body() and not self._is_infer_of_a_program():
            kind = kinds[0].partition(b";")[0].strip().lower() if len(kinds) == 1 else b""
            if kind != b"application/json":
                raise ApiError(415, "The body has to be sent as application/json.", code="unsupported_media_type")

    def _is_infer_of_a_program(self) -> bool:
        """Whether this is inference in KServe's protocol that no web page asks for: its clients send no type, or that
        of binary data. Browsers say whose page a POST comes from.
        """
        return is_infer_path(self._scope["path"]) and not self._header(b"origin")

    # -- the body

    def _has_body(self) -> bool:
        return bool(self._header(b"transfer-encoding")) or self._header(b"content-length") not in ([], [b"0"])

    def _drop_rest(self) -> None:
        """Let the connection drop what the client still sends: nothing of it is parsed."""
        self._drops_rest = True
        drop = self._scope.get("state", {}).get("drop_rest")
        if drop is not None:
            drop()

    def _read_length(self) -> int:
        """Return the body's length according to the headers; 0 if they do not state it."""
        found = self._header(b"content-length")
        return int(found[0]) if found and found[0].isdigit() else 0

    async def _read_body(self) -> bytes | None:
        """Return the whole body, counted while it arrives; None if the client left meanwhile."""
        max_bytes = self._gate.settings.max_body_bytes
        if self._read_length() > max_bytes:
            raise ApiError(413, f"The body is larger than {max_bytes} bytes.", code="body_too_large")
        limit = asyncio.get_running_loop().call_later(self._gate.settings.body_timeout_s, self._on_body_late)
        try:
            return await self._read_pieces(max_bytes)
        except asyncio.CancelledError:
            if not self._body_late:
                raise
            raise ApiError(408, "The body did not arrive in time.", code="body_timeout") from None
        finally:
            limit.cancel()

    def _on_body_late(self) -> None:
        self._body_late = True
        self._cancel()

    async def _read_pieces(self, max_bytes: int) -> bytes | None:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._client_left = True
                return None
            piece = message.get("body", b"")
            body += piece
            self._held.add(len(piece))
            if len(body) > max_bytes:
                raise ApiError(413, f"The body is larger than {max_bytes} bytes.", code="body_too_large")
            if not message.get("more_body", False):
                whole = bytes(body)
                body.clear()
                is_infer = is_infer_path(self._scope["path"])
                text = whole[: find_json_length(self._scope["headers"], len(whole))] if is_infer else whole
                if len(whole) > LARGE_BYTES and self._scope["path"] in READ:  # checked in another process, then charged
                    self._held.add(len(whole))
                else:
                    self._held.add(await self._gate.fast_path.read(len(text), object_bytes, text))
                return whole

    # -- the route

    async def _run_route(self, body: bytes) -> None:
        """Run the route until it is done or the client has left."""
        was_read = False

        async def receive() -> Message:
            nonlocal was_read
            if not was_read:
                was_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()  # a route that waits for the client to leave is cancelled when it does
            raise AssertionError("unreachable")

        scope = self._scope
        if scope["method"] == "HEAD":  # as GET; the connection sends no body
            scope = {**scope, "method": "GET"}
        failed: Exception | None = None
        when_lost = scope.get("state", {}).get("when_lost")
        forget = when_lost(self._on_client_left) if when_lost is not None else None
        try:
            if self._context.reservation is not None:
                await self._gate.generating.wait(self._client)
            elif scope["path"] not in OPEN:
                await self._gate.routing.wait(self._client)
            await self._gate.app(scope, receive, self._send_watched)
        except asyncio.CancelledError:
            if not self._client_left:
                raise
        except Exception as error:
            failed = error
        finally:
            if forget is not None:
                forget()
        if failed is not None:
            facts = {"request_id": self._context.request_id}
            log.error("a route failed", exc_info=failed, extra={"facts": facts})
            if self._status is None:
                await self._refuse(internal())
            elif not self._complete:
                raise failed

    def _on_client_left(self) -> None:
        if not self._complete:
            self._client_left = True
            self._cancel()

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _send_watched(self, message: Message) -> None:
        """Send a part of the answer; `Gate.sweep` closes the connection if that takes too long."""
        state = self._scope.get("state", {})
        if message["type"] == "http.response.start":
            self._status = message["status"]
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if self._scope.get("http_version") == "1.1" and not has_length:  # then the body is sent in chunks
                self._context.writer.transport = state.get("transport")
            headers = [*message.get("headers", ()), (b"x-request-id", self._context.request_id.encode())]
            if self._drops_rest:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        rest_dropped = state.get("rest_dropped")
        slow = self._status == 408 or self._context.writer.transport is not None  # chunks have an end to be sent
        if is_last and self._drops_rest and rest_dropped is not None and not slow:
            self._complete = True
            await self._send({**message, "more_body": True})
            await rest_dropped()
            message = {"type": "http.response.body", "body": b""}
        close = state.get("cut_off")
        if close is not None:
            self._gate.sends[id(self)] = (time.monotonic(), close)
        try:
            await self._send(message)
        finally:
            self._gate.sends.pop(id(self), None)
        self._complete = self._complete or is_last

    async def _refuse(self, error: ApiError, body: Mapping[str, Any] | None = None) -> None:
        """Answer with an error."""
        data = encode_json(body or error_body(error, self._scope["path"]))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
            if self._scope["path"] in PAGE:
                headers.append((b"www-authenticate", b'Basic realm="Inferplane: the password is a key"'))
        await self._send_watched({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send_watched({"type": "http.response.body", "body": data})
