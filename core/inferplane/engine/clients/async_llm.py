"""`AsyncLLM`: many callers of one engine, each with a stream of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.engine.clients.client import EngineClient, Health, ModelInfo, Order, Question, RequestId
from inferplane.engine.request import arguments
from inferplane.engine.request.arguments import Prompt
from inferplane.engine.request.embedding import check_dimensions, embedding_params, finished
from inferplane.engine.request.params import SamplingParams, known_keywords
from inferplane.engine.request.results import Delta, Timings
from inferplane.engine.request.text import Tokenizer
from inferplane.errors import InferplaneError, UsageError

if TYPE_CHECKING:
    from inferplane.engine.clients.llm import LLM

Take = Callable[[Delta], None]
LONG_PROMPT = 4096
"""Characters from which a prompt is encoded in a thread, so that other streams of the caller's loop go on."""


class _Mailbox:
    """Streams of one asyncio loop. Pieces of a step come over to it together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.streams: dict[RequestId, Take] = {}

    def deliver(self, pieces: list[tuple[RequestId, Delta]]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the pieces
            self.loop.call_soon_threadsafe(self._put, pieces)

    def _put(self, pieces: list[tuple[RequestId, Delta]]) -> None:
        for request_id, piece in pieces:
            take = self.streams.get(request_id)
            if take is not None:
                take(piece)


class AsyncLLM:
    """A model on one device, for servers. Its methods may be used on any asyncio loop, of any thread.

        llm = AsyncLLM("demo")
        async for piece in llm.generate("def main():", SamplingParams(max_tokens=40)):
            print(piece.text, end="")
        await llm.shutdown()

    Args:
        model: see `LLM`.
        process: run the engine in a process of its own, which neither waits for this one's Python code nor dies with
            it unnoticed. That process finds plugins as this one did at its start: by installed distributions and by the
            environment, not by what was registered by hand. Otherwise it runs in a thread.
        max_waiting: requests that may wait; more are refused with a CapacityError. None: any number.
        warned: with `process`, told what there is to warn of while the model is loaded. None: that goes through
            `warnings`, whose filters every thread changes for all: one that imports a library can make it unheard.
        options: every other argument of `LLM`.

    Raises:
        As `LLM`. UsageError: `warned` without `process`. EngineError: the process ended while it was starting.
    """

    def __init__(
        self,
        model: Any = "demo",
        *,
        process: bool = False,
        max_waiting: int | None = None,
        warned: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        options["max_waiting"] = max_waiting
        client: EngineClient
        if process:
            from inferplane.engine.clients.process import RemoteEngine

            client = RemoteEngine.start(model, options, warned)
        elif warned is not None:
            raise UsageError("warned without process=True.", remedy="leave it out: warnings are raised here")
        else:
            from inferplane.engine.clients.llm import LLM
            from inferplane.engine.clients.local import LocalEngine

            client = LocalEngine(LLM(model, **options))
        self._begin(client)

    @classmethod
    def connect(cls, address: str) -> AsyncLLM:
        """Use the engine of another process, which an `AsyncLLM(process=True)` has started.

        Args:
            address: that one's `address`.

        Raises:
            EngineError: nothing answers there.
        """
        from inferplane.engine.clients.process import RemoteEngine

        llm = cls.__new__(cls)
        llm._begin(RemoteEngine.connect(address))
        return llm

    def _begin(self, client: EngineClient) -> None:
        self._client = client
        self._ids = count()
        self._lock = threading.Lock()
        self._owners: dict[RequestId, tuple[RequestId, _Mailbox]] = {}  # a caller's id -> the engine's
        self._mailboxes: dict[asyncio.AbstractEventLoop, _Mailbox] = {}  # of loops with live streams
        self._tokenizer: Tokenizer | None = None

    # -- the model

    @property
    def info(self) -> ModelInfo:
        """Its name, device, dtype, vocabulary and limits."""
        return self._client.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, loaded at first use.

        Raises:
            UsageError: the model has no folder. CheckpointError: the folder has no usable tokenizer.
        """
        with self._lock:
            if self._tokenizer is None:
                if self.info.folder is None:
                    raise UsageError("A model given as a config has no tokenizer.", remedy="pass prompts as token ids")
                self._tokenizer = Tokenizer(Path(self.info.folder), self.info.tokenizer)
            return self._tokenizer

    @property
    def llm(self) -> LLM:
        """The model itself, when it lives in this process.

        Raises:
            UsageError: it lives in another.
        """
        found: LLM | None = getattr(self._client, "llm", None)
        if found is None:
            raise UsageError("The model lives in a process of its own.", there_is="info, stats, health and explain")
        return found

    @property
    def address(self) -> str:
        """Where other processes of the same user reach the engine (`AsyncLLM.connect`); "": nowhere, for it runs in a
        thread of this one."""
        return str(getattr(self._client, "address", ""))

    # -- requests

    @known_keywords
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: RequestId | None = None,
        *,
        index: int = 0,
        priority: int = 0,
        tenant: str = "",
    ) -> AsyncIterator[Delta]:
        """Continue one prompt, piece by piece; the last piece, and it alone, has a `finish_reason`.

        Leaving the loop early, or cancelling the task, ends the request within a step and frees its blocks.

        Args:
            prompt: a string or a list of token ids.
            params: how to sample. `timeout_s` ends the request with "timeout".
            request_id: for `abort`; unique among live requests. None: one of its own.
            index: which of several sequences for this prompt: each draws other random numbers from the same seed. For
                `params.n` sequences start n streams.
            priority: lower runs first.
            tenant: cached prefixes are shared within one only.

        Raises:
            UsageError, CapacityError: the request was refused; nothing of it remains.
            EngineError: the engine has ended.
        """
        pieces: asyncio.Queue[Delta] = asyncio.Queue()
        order = await self._order(prompt, params, index, priority, tenant)
        box = self._register(request_id, order, pieces.put_nowait)
        ended = False
        try:
            late = await self._queued(order, box)
            if late is not None:
                yield late
                return
            while not ended:
                piece = await pieces.get()
                ended = piece.finish_reason is not None
                yield piece
        finally:
            self._leave(request_id, order, box, ended)

    @known_keywords
    async def embed(
        self,
        prompt: Prompt,
        request_id: RequestId | None = None,
        *,
        pooling: str = "last",
        dimensions: int | None = None,
        normalize: bool = True,
        priority: int = 0,
        tenant: str = "",
    ) -> list[float]:
        """A vector for a prompt; see `LLM.embed`. Cancelling it ends the request.

        Raises:
            As `generate`. UsageError: no such pooling, or fewer dimensions. GenerationError: it failed while it ran.
        """
        check_dimensions(dimensions, self.info.width)
        more: dict[str, Any] = {"priority": priority, "tenant": tenant}
        vector, error = None, ""
        async for piece in self.generate(prompt, embedding_params(pooling), request_id, **more):
            vector, error = piece.embedding, piece.error
        return finished(vector, dimensions, normalize=normalize, error=error)

    async def feed(
        self,
        take: Take,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: RequestId | None = None,
        *,
        index: int = 0,
        priority: int = 0,
        tenant: str = "",
        alone: str = "",
    ) -> None:
        """As `generate`, for whoever serves many streams: every piece is passed to a function, in the caller's loop,
        and costs no switch of tasks. Returns after the last one; cancelling it ends the request.

        Args:
            take: gets the pieces. It must not raise; if it does, so does this method, and the request is ended.
            alone: an id that no other live request of the tenant may have, also none of another process over the same
                engine; "": any number may live.

        Raises:
            As `generate`.
        """
        order = await self._order(prompt, params, index, priority, tenant, alone)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def hand_over(piece: Delta) -> None:
            if done.done():
                return
            try:
                take(piece)
            except Exception as error:
                done.set_exception(error)
            else:
                if piece.finish_reason is not None:
                    done.set_result(None)

        box = self._register(request_id, order, hand_over)
        ended = False
        try:
            late = await self._queued(order, box)
            if late is not None:
                hand_over(late)
            await done
            ended = late is None
        finally:
            done.cancel()
            self._leave(request_id, order, box, ended)

    async def _order(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        index: int,
        priority: int,
        tenant: str,
        alone: str = "",
    ) -> Order:
        params, where = arguments.sampling(params), arguments.place(index, priority, tenant, alone)
        if params.n > 1:
            raise UsageError(
                f"generate with n = {params.n}.", remedy="start n streams with n = 1 and index = 0 to n - 1"
            )
        ids = await self._encode(prompt)
        arguments.check_ids(ids, self.info.vocab)
        # The engine knows each by a number of its own: a caller may use an id again while a request that was given up
        # under it still ends.
        return Order(next(self._ids), ids, params, *where)

    async def _queued(self, order: Order, box: _Mailbox) -> Delta | None:
        """Wait until a request is queued; its last piece, if it is late before that: others' constraints take time."""
        arrived, limit = time.monotonic(), order.params.timeout_s
        answer = asyncio.wrap_future(self._client.submit(order, box))
        if order.params.constraint is None or limit is None:
            await answer
            return None
        try:  # not by `wait_for`, which before Python 3.12 can swallow a cancellation that comes with the answer
            await asyncio.wait({answer}, timeout=limit)
            if answer.done():
                answer.result()  # raises what refused it
                return None
        finally:
            answer.cancel()  # nothing, if it is done
        waited = time.monotonic() - arrived
        return Delta("", [], "timeout", Timings(waited, waited, waited, len(order.prompt), 0))

    def _leave(self, request_id: RequestId | None, order: Order, box: _Mailbox, ended: bool) -> None:
        """Let go of a request; one that has not ended is aborted, also when it is only about to be queued."""
        self._unregister(request_id, order, box)
        if not ended:
            self._client.abort(order.request_id, box)

    def abort(self, request_id: RequestId) -> None:
        """End a request; its stream gets a last piece with "abort". Unknown and ended ids are ignored."""
        with self._lock:
            found = self._owners.get(request_id)
        if found is not None:
            self._client.abort(*found)

    def _register(self, request_id: RequestId | None, order: Order, take: Take) -> _Mailbox:
        loop = asyncio.get_running_loop()
        with self._lock:
            if request_id in self._owners:
                raise UsageError(f"Request {request_id!r} is alive already.", remedy="use another request_id")
            box = self._mailboxes.setdefault(loop, _Mailbox(loop))
            if request_id is not None:
                self._owners[request_id] = order.request_id, box
            box.streams[order.request_id] = take
            return box

    def _unregister(self, request_id: RequestId | None, order: Order, box: _Mailbox) -> None:
        with self._lock:
            if request_id is not None:
                del self._owners[request_id]
            del box.streams[order.request_id]
            if not box.streams:
                self._mailboxes.pop(box.loop, None)

    async def _encode(self, prompt: Prompt) -> list[int]:
        prompt = arguments.one_prompt(prompt)
        if not isinstance(prompt, str):
            return [i.item() if hasattr(i, "item") else i for i in prompt]
        if self._tokenizer is not None and len(prompt) < LONG_PROMPT:
            return self._tokenizer.encode(prompt)
        return await asyncio.to_thread(lambda: self.tokenizer.encode(prompt))

    # -- the engine

    async def stats(self) -> dict[str, Any]:
        """Counters, gauges and histograms of the engine (`inferplane.engine.loop.metrics`)."""
        return await self._ask("stats")

    async def explain(self) -> dict[str, Any]:
        """The plan as data: see `LLM.explain`."""
        return await self._ask("explain")

    async def health(self, timeout_s: float = 2.0) -> Health:
        """Whether the engine does its work; one that does not answer in time is not alive."""
        try:
            return Health(**await asyncio.wait_for(self._ask("health"), timeout_s))
        except asyncio.TimeoutError:
            return Health(alive=False, failure=f"no answer within {timeout_s:g} s")
        except InferplaneError as error:
            return Health(alive=False, failure=error.what.rstrip("."))  # what to do about it, whoever asks knows
        except Exception as error:
            return Health(alive=False, failure=str(error))

    async def _ask(self, question: Question) -> dict[str, Any]:
        return await asyncio.wrap_future(self._client.ask(question))

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let those that live run for up to `drain_s` seconds, abort the rest, free the model."""
        await asyncio.to_thread(self._client.close, drain_s)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *unused: object) -> None:
        await self.shutdown()
