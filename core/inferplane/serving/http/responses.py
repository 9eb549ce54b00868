"""An answer that is generated: from admission to the last byte, in whatever wire format."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from inferplane.serving.admission import GenerateCall
from inferplane.serving.errors import ApiError, internal
from inferplane.serving.generation import Generation, Piece
from inferplane.serving.http.gate import BODY, FACTS, FOLLOWED, RESERVED, TENANT, Body, Receive, Scope, Send
from inferplane.serving.rendering import GeneratedChoice, Rendering, compact
from inferplane.serving.service import Service
from inferplane.serving.tracing import carried

PATIENCE_S = 3.0
"""Seconds to wait for a stream's first piece before its status goes out: what is refused meanwhile gets its own."""
PING_S = 15.0
"""Seconds of silence after which a stream sends a sign of life."""
IGNORED = "x-inferplane-ignored"
MAX_NAMES_CHARACTERS = 400
Answer = Callable[[Scope, bytes], Awaitable[Response]]
"""From a request's scope and body to what answers it."""
log = logging.getLogger("inferplane.serving")


class Generation(Response):
    """Admits an ask, runs it, renders it. When its task is cancelled (the client left), what runs of it is ended.

    Args:
        service: runs it.
        ask: what was asked.
        rendering: the wire format.
        stream: piece by piece, or as a whole.
        ignored: fields of the request that were not understood.
    """

    def __init__(
        self, service: Service, ask: GenerateCall, rendering: Rendering, *, stream: bool, ignored: Sequence[str] = ()
    ) -> None:
        super().__init__()  # frameworks read the attributes that it sets
        self._service, self._ask, self._rendering = service, ask, rendering
        self._streams, self._ignored = stream, ignored
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        facts = scope[FACTS]
        try:
            async with self._service.admit(self._of(scope), scope.get(RESERVED)) as generation:
                try:
                    if self._streams:
                        await self._stream(generation, scope, send)
                    else:
                        await self._whole(generation, scope, receive, send)
                finally:
                    facts.update(prompt_tokens=generation.prompt_tokens, completion_tokens=generation.completion_tokens)
                    facts.update(choices=generation.choices, finished=",".join(sorted(set(generation.finished))))
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
        except Exception:
            if self._begun:
                raise
            log.exception("a request failed in the server")
            await self._refuse(internal(), scope, receive, send)

    def _of(self, scope: Scope) -> GenerateCall:
        """What is asked, by whom."""
        trace = carried(scope["headers"]) if self._service.tracer is not None else {}
        scope[FOLLOWED] = self._service.model is not None
        return replace(self._ask, tenant=scope[TENANT], trace=trace)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._begun = True
        scope[FACTS]["error"] = error.code
        await refuse(error, self._rendering.refusal(error))(scope, receive, send)

    def _more_headers(self) -> dict[str, str]:
        return ignored_header(self._ignored)

    async def _whole(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        choices = await gather(generation)
        answer = compact(self._rendering.whole(generation, choices))
        response = Response(answer, media_type="application/json", headers=self._more_headers())
        self._begun = True
        await response(scope, receive, send)

    async def _stream(self, generation: Generation, scope: Scope, send: Send) -> None:
        await generation.begin(PATIENCE_S)
        headers = {"content-type": f"{self._rendering.media_type}; charset=utf-8", "cache-control": "no-cache"}
        headers.update({"x-accel-buffering": "no", **self._more_headers()})
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        body: Body = scope[BODY]
        pulse, rendered = _Pulse(body, self._rendering.ping), self._rendering.piece

        opening = b""

        def at_once(piece: Piece) -> bool:
            if opening or not body.ready:
                return False
            pulse.write(rendered(generation, piece))
            return True

        try:
            try:
                opening = self._rendering.opening(
                    generation
                )  # with the first piece: clients take it for the first token
                if self._service.settings.disable_streaming:
                    batches = _together(generation)
                else:  # several sequences' pieces of a step share a chunk
                    batches = generation.batches(at_once if generation.choices == 1 else None)
                async for several in batches:
                    await pulse.send(
                        opening + b"".join([self._rendering.piece(generation, piece) for piece in several])
                    )
                    opening = b""
                await pulse.send(opening + self._rendering.closing(generation))
            except ApiError as error:
                await pulse.send(self._rendering.failure(error))
            except Exception:
                log.exception("a stream failed in the server")
                await pulse.send(self._rendering.failure(internal()))
        finally:
            pulse.stop()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Pulse:
    """Sends a stream's bytes, and a sign of life when there were none for a while."""

    def __init__(self, body: Body, ping: bytes) -> None:
        self._body, self._ping, self._last = body, ping, time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._beat = self._loop.call_later(PING_S, self._beaten) if ping else None
        self._behind: asyncio.Task[None] | None = None

    def write(self, data: bytes) -> None:
        if data:
            self._last = time.monotonic()
            self._body.write(data)

    async def send(self, data: bytes) -> None:
        if data:
            self._last = time.monotonic()
            await self._body.send(data)

    def stop(self) -> None:
        for pending in (self._beat, self._behind):
            if pending is not None:
                pending.cancel()

    def _beaten(self) -> None:
        quiet_s = time.monotonic() - self._last
        if quiet_s >= PING_S:
            quiet_s = 0.0
            if self._body.ready:
                self.write(self._ping)
            elif self._behind is None or self._behind.done():
                self._behind = self._loop.create_task(self.send(self._ping))
        self._beat = self._loop.call_later(max(0.1, PING_S - quiet_s), self._beaten)


async def gather(generation: Generation) -> list[GeneratedChoice]:
    """All pieces of a job, by sequence; its ApiError when one of them fails."""
    choices = [GeneratedChoice() for _ in range(generation.choices)]
    async for piece in generation.pieces():
        choices[piece.choice].add(piece.delta)
    return choices


async def _together(generation: Generation) -> AsyncIterator[list[Piece]]:
    yield [Piece(i, choice.delta()) for i, choice in enumerate(await gather(generation))]


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """A header that names the fields which were not understood."""
    plain = [n for n in names if n.isascii() and n.isprintable()]
    return {IGNORED: ", ".join(plain)[:MAX_NAMES_CHARACTERS]} if names else {}


def refuse(error: ApiError, body: Any) -> JSONResponse:
    """An error as a response."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return JSONResponse(body, error.status, headers)


def told(error: ApiError, scope: Scope) -> Response:
    """An error that ends a request, as OpenAI words it; the log tells it, too."""
    scope[FACTS]["error"] = error.code
    return refuse(error, error.body())


async def answered(answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body comes in one piece, as a framework would."""
    try:
        response = await answer(scope, (await receive())["body"])
    except ApiError as error:
        response = told(error, scope)
    except Exception:
        await told(internal(), scope)(scope, receive, send)
        raise  # the gate logs it
    await response(scope, receive, send)
