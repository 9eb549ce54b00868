"""Generated answers: from admission to the last byte, in any wire format. And errors as responses."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from inferplane.serving.admission import GenerateCall
from inferplane.serving.errors import ApiError, internal
from inferplane.serving.generation import Generation, Piece
from inferplane.serving.http.chunks import ChunkWriter
from inferplane.serving.http.scope import Receive, Scope, Send, context_of
from inferplane.serving.kserve.names import error_body
from inferplane.serving.rendering import Rendering, gather_choices
from inferplane.serving.service import Service
from inferplane.serving.tracing import trace_headers

FIRST_PIECE_TIMEOUT_S = 3.0
"""How long to delay the 200 header of a stream, so that an early refusal can still send its own status."""
PING_S = 15.0
"""Seconds of silence after which a stream sends a ping."""
IGNORED = "x-inferplane-ignored"
MAX_NAMES_CHARACTERS = 400
_WORD = re.compile(r"[A-Za-z0-9_.-]+")
Handler = Callable[[Scope, bytes], Awaitable[Response]]
"""Makes the response to a request from its scope and body."""
log = logging.getLogger("inferplane.serving")


class GenerateResponse(Response):
    """Admits a call, runs it, renders it. If its task is cancelled because the client left, its sequences are aborted.

    Args:
        service: runs it.
        call: the request.
        rendering: the wire format of the answer.
        stream: answer piece by piece instead of all at once.
        ignored: fields of the request that the format does not know.
    """

    def __init__(
        self, service: Service, call: GenerateCall, rendering: Rendering, *, stream: bool, ignored: Sequence[str] = ()
    ) -> None:
        super().__init__()  # frameworks read the attributes that it sets
        self._service, self._call, self._rendering = service, call, rendering
        self._streams, self._ignored = stream, ignored
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            async with self._service.admit(self._complete_call(scope), context.reservation) as generation:
                try:
                    if self._streams:
                        await self._stream(generation, scope, send)
                    else:
                        await self._answer_at_once(generation, scope, receive, send)
                finally:
                    tokens = {"completion_tokens": generation.completion_tokens, "choices": generation.num_choices}
                    context.facts.update(prompt_tokens=generation.prompt_tokens, **tokens)
                    context.facts.update(finished=",".join(sorted(set(generation.finish_reasons))))
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
        except Exception:
            if self._started:
                raise
            log.exception("a request failed in the server")
            await self._refuse(internal(), scope, receive, send)

    def _complete_call(self, scope: Scope) -> GenerateCall:
        """Return the call with what the scope knows: its key, its time limit, its span's parent."""
        context = context_of(scope)
        trace = trace_headers(scope["headers"]) if self._service.tracer is not None else {}
        context.is_traced = self._service.model is not None
        return replace(self._call, key=context.key, trace=trace, deadline=context.deadline)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._started = True
        context_of(scope).facts["error"] = error.code
        await error_response(error, self._rendering.error_body(error))(scope, receive, send)

    async def _answer_at_once(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        choices = await gather_choices(generation)
        data, headers = self._rendering.encode_answer(generation, choices)
        response = Response(data, headers={**headers, **report_ignored_fields(self._ignored)})
        self._started = True
        await response(scope, receive, send)

    async def _stream(self, generation: Generation, scope: Scope, send: Send) -> None:
        await generation.wait_for_first_piece(FIRST_PIECE_TIMEOUT_S)
        headers = {"content-type": f"{self._rendering.media_type}; charset=utf-8", "cache-control": "no-cache"}
        headers.update({"x-accel-buffering": "no", **report_ignored_fields(self._ignored)})
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        writer = context_of(scope).writer
        stream, render = _PingedStream(writer, self._rendering.ping), self._rendering.piece
        opening = b""

        def write_now(piece: Piece) -> bool:
            if opening or not writer.ready:
                return False
            stream.write(render(generation, piece))
            return True

        try:
            try:
                opening = self._rendering.opening(generation)  # sent with the first piece: clients time it as a token
                if self._service.settings.disable_streaming:
                    batches = _all_together(generation)
                else:  # several sequences' pieces of a step share a chunk
                    batches = generation.batches(write_now if generation.num_choices == 1 else None)
                async for pieces in batches:
                    await stream.send(opening + b"".join([render(generation, piece) for piece in pieces]))
                    opening = b""
                await stream.send(opening + self._rendering.closing(generation))
            except ApiError as error:
                await stream.send(self._rendering.failure(error))
            except Exception:
                log.exception("a stream failed in the server")
                await stream.send(self._rendering.failure(internal()))
        finally:
            stream.stop()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _PingedStream:
    """Sends the bytes of a stream, and a ping after `PING_S` seconds without any.

    Args:
        writer: of the answer.
        ping: what to send; empty: never.
    """

    def __init__(self, writer: ChunkWriter, ping: bytes) -> None:
        self._writer, self._ping, self._last_sent = writer, ping, time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(PING_S, self._on_timer) if ping else None
        self._slow_ping: asyncio.Task[None] | None = None

    def write(self, data: bytes) -> None:
        if data:
            self._last_sent = time.monotonic()
            self._writer.write(data)

    async def send(self, data: bytes) -> None:
        if data:
            self._last_sent = time.monotonic()
            await self._writer.send(data)

    def stop(self) -> None:
        for pending in (self._timer, self._slow_ping):
            if pending is not None:
                pending.cancel()

    def _on_timer(self) -> None:
        quiet_s = time.monotonic() - self._last_sent
        if quiet_s >= PING_S:
            quiet_s = 0.0
            if self._writer.ready:
                self.write(self._ping)
            elif self._slow_ping is None or self._slow_ping.done():
                self._slow_ping = self._loop.create_task(self.send(self._ping))
        self._timer = self._loop.call_later(max(0.1, PING_S - quiet_s), self._on_timer)


async def _all_together(generation: Generation) -> AsyncIterator[list[Piece]]:
    yield [Piece(i, choice.delta()) for i, choice in enumerate(await gather_choices(generation))]


def report_ignored_fields(names: Sequence[str]) -> dict[str, str]:
    """Return the header that names what of a request has no effect: a list, in which a name that is no plain word is a
    JSON string. A list that would be too long ends with the number of the other names.
    """
    shown, length = [], 0
    for name in names:
        quoted = name if _WORD.fullmatch(name) else json.dumps(name).replace("\x7f", "\\u007f")
        length += len(quoted) + 2
        if length > MAX_NAMES_CHARACTERS:
            break
        shown.append(quoted)
    left = len(names) - len(shown)
    return {IGNORED: ", ".join([*shown, f"and {left} more"] if left else shown)} if names else {}


def error_response(error: ApiError, body: Any) -> JSONResponse:
    """Return an error as a response."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return JSONResponse(body, error.status, headers)


def plain_error_response(error: ApiError, scope: Scope) -> Response:
    """Return an error in the form of its path, OpenAI's or KServe's, and note its code for the log."""
    context_of(scope).facts["error"] = error.code
    return error_response(error, error_body(error, scope["path"]))


async def run_handler(service: Service, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body arrives in one piece, as a framework would."""
    try:
        response = await handler(scope, (await receive())["body"])
    except ApiError as error:
        service.count_refusal(error)
        response = plain_error_response(error, scope)
    except Exception:
        await plain_error_response(internal(), scope)(scope, receive, send)
        raise  # the gate logs it
    await response(scope, receive, send)
