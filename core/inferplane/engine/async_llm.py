"""`AsyncLLM`: many callers of one engine, each with a stream of its own.

One thread runs the engine; callers live on any asyncio loops and threads. Only that thread touches the engine: requests
and aborts reach it through a queue, pieces of text come back through each caller's own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

from inferplane.engine.arguments import sampling
from inferplane.engine.llm import LLM, Prompt
from inferplane.engine.params import SamplingParams
from inferplane.engine.request import Delta, Request
from inferplane.errors import UsageError

Deliver = Callable[[Delta], None]


@dataclass
class _Stream:
    """A request with the way back to its caller."""

    request: Request
    deliver: Deliver
    sent: int = 0


class AsyncLLM:
    """A model on one device, for servers.

        llm = AsyncLLM("demo")
        async for piece in llm.generate("def main():", SamplingParams(max_tokens=40)):
            print(piece.text, end="")
        await llm.shutdown()

    Args:
        model: see `LLM`.
        max_waiting: requests that may wait; more are refused with a CapacityError. None: any number.
        options: every other argument of `LLM`.

    Raises:
        As `LLM`.
    """

    def __init__(self, model: Any = "demo", *, max_waiting: int | None = None, **options: Any) -> None:
        self.llm = LLM(model, max_waiting=max_waiting, **options)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[int | str, _Stream] = {}
        self._ended = threading.Event()
        self._draining = False
        self._ids = count()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="inferplane-engine", daemon=True)
        self._thread.start()

    # -- for callers

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: int | str | None = None, **more: Any
    ) -> AsyncIterator[Delta]:
        """Continue one prompt, piece by piece; the last piece, and it alone, has a `finish_reason`.

        Leaving the loop early, or cancelling the task, ends the request within a step and frees its blocks.

        Args:
            prompt: a string or a list of token ids.
            params: how to sample. `timeout_s` ends the request with "timeout".
            request_id: for `abort`; unique among live requests. None: a number.
            more: `priority` (lower runs first) and `tenant` (cached prefixes are shared within one only).

        Raises:
            UsageError, CapacityError: the request was refused; nothing of it remains.
        """
        params = sampling(params)
        if params.n > 1:
            raise UsageError(f"generate with n = {params.n}.", remedy="start one stream a sequence")
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Delta] = asyncio.Queue()

        def deliver(piece: Delta) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits for the piece
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        more["request_id"] = f"stream-{next(self._ids)}" if request_id is None else request_id
        added = False
        try:
            # Shielded: a caller who is cancelled meanwhile still learns nothing, but the request is known, and aborted.
            asking = asyncio.ensure_future(self._ask(lambda: self._add(prompt, params, deliver, more)))
            try:
                await asyncio.shield(asking)
            except asyncio.CancelledError:
                asking.add_done_callback(lambda done: done.cancelled() or done.exception())
                added = True  # or about to be: the abort stands behind it in the queue
                raise
            added = True
            while True:
                piece = await pieces.get()
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            if added:
                self.abort(more["request_id"])

    def abort(self, request_id: int | str) -> None:
        """End a request; its stream gets a last piece with "abort". Unknown and ended ids are ignored."""
        self._inbox.put(lambda: self._abort(request_id))

    async def stats(self) -> dict[str, Any]:
        """Counters, gauges and histograms of the engine (`inferplane.engine.metrics`)."""
        return await self._ask(self.llm.engine.stats)

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let those that live run for up to `drain_s` seconds, abort the rest, free the model."""
        self._draining = True
        if drain_s > 0 and self._thread.is_alive():
            limit = asyncio.get_running_loop().time() + drain_s
            while await self._busy() and asyncio.get_running_loop().time() < limit:
                await asyncio.sleep(0.02)
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *unused: object) -> None:
        await self.shutdown()

    async def _busy(self) -> bool:
        return not self._ended.is_set() and bool(self._streams)

    async def _ask(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the engine's thread and wait for its result."""
        answer: Future[Any] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)

        self._inbox.put(run)
        if self._ended.is_set():  # it may have ended just before: then nobody empties the queue but us
            self._refuse()
        return await asyncio.wrap_future(answer)

    # -- in the engine's thread

    def _add(self, prompt: Prompt, params: SamplingParams, deliver: Deliver, more: dict[str, Any]) -> Request:
        if self._draining or self._ended.is_set():
            raise UsageError("The model is shut down.", remedy="make a new AsyncLLM")
        request = self.llm.add(prompt, params, **more)
        self._streams[request.request_id] = _Stream(request, deliver)
        return request

    def _abort(self, request_id: int | str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self.llm.engine.end(stream.request, "abort")
            self._send(stream)

    def _send(self, stream: _Stream) -> None:
        """What is new since the last piece; the last one ends the stream."""
        request = stream.request
        reason, new = request.finish_reason, request.generated[stream.sent :]
        if reason is None and not new:
            return
        scored = None if request.logprobs is None else request.logprobs[stream.sent :]
        stream.sent += len(new)
        text = request.text.take(end=reason is not None) if request.text is not None else ""
        timings = request.timings() if reason is not None else None
        if reason is not None:
            self._streams.pop(request.request_id, None)
        stream.deliver(Delta(text, new, reason, timings, request.error, scored))

    def _loop(self) -> None:
        engine = self.llm.engine
        try:
            while True:
                while not engine.busy or not self._inbox.empty():
                    work = self._inbox.get()
                    if work is None:
                        return
                    work()
                for request in engine.step():
                    stream = self._streams.get(request.request_id)
                    if stream is not None:
                        self._send(stream)
        except BaseException as error:
            self._failure = error
        finally:
            self._ended.set()
            for stream in list(self._streams.values()):
                reason = "abort" if self._failure is None else "error"
                said = "" if self._failure is None else f"the engine stopped: {self._failure}"
                engine.end(stream.request, reason, said)  # type: ignore[arg-type]
                try:
                    self._send(stream)
                except Exception as error:  # its text cannot be had: its end still can
                    stream.deliver(Delta("", [], "error", stream.request.timings(), f"{said} {error}".strip()))
            self._refuse()

    def _refuse(self) -> None:
        """Answer what still waits in the queue; `_add` refuses once the engine has ended."""
        while True:
            try:
                work = self._inbox.get_nowait()
            except queue.Empty:
                return
            if work is not None:
                work()
