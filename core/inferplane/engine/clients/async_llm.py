"""`AsyncLLM`: many callers of one engine, each with a stream of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import TYPE_CHECKING, Any

from inferplane.engine.clients.chat import stream_reply
from inferplane.engine.clients.client import EngineClient, Health, ModelInfo, Question, RequestId, Submission
from inferplane.engine.clients.embedding import check_dimensions, embedding_params, finish_embedding
from inferplane.engine.clients.streams import OnPiece, Streams
from inferplane.engine.request import arguments
from inferplane.engine.request.params import SamplingParams, check_keywords
from inferplane.engine.request.results import Delta
from inferplane.engine.request.text import Tokenizer
from inferplane.errors import InferplaneError, UsageError
from inferplane.renamed import old_keywords

if TYPE_CHECKING:
    from inferplane.engine.clients.llm import LLM

LONG_PROMPT = 4096
"""Characters of a prompt from which it is encoded in a thread, so that other streams of the loop go on."""


class AsyncLLM:
    """A model on one device, for servers. Its methods may be used on any asyncio loop, of any thread.

        llm = AsyncLLM("demo")
        async for piece in llm.generate("def main():", SamplingParams(max_tokens=40)):
            print(piece.text, end="")
        await llm.shutdown()

    Args:
        model: see `LLM`.
        process: run the engine in a process of its own, which does not wait for this one's Python code, and whose
            failure is reported. That process finds plugins by installed distributions and by the environment, not by
            what was registered by hand. Otherwise it runs in a thread.
        max_waiting: maximum number of waiting requests; more are rejected with a CapacityError. None: unlimited.
        on_warning: with `process`, called with each warning while the model is loaded. None: they go through
            `warnings`, whose filters are shared by all threads: one that imports a library can suppress them.
        options: every other argument of `LLM`.

    Raises:
        As `LLM`. UsageError: `on_warning` without `process`. EngineError: the process ended while it was starting.
    """

    @old_keywords(warned="on_warning")
    def __init__(
        self,
        model: Any = "demo",
        *,
        process: bool = False,
        max_waiting: int | None = None,
        on_warning: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        options["max_waiting"] = max_waiting
        client: EngineClient
        if arguments.as_bool("process", process):
            from inferplane.engine.clients.process.remote import RemoteEngine

            client = RemoteEngine.start(model, options, on_warning)
        elif on_warning is not None:
            raise UsageError("on_warning without process=True.", remedy="leave it out: warnings are raised here")
        else:
            from inferplane.engine.clients.llm import LLM
            from inferplane.engine.clients.local import LocalEngine

            client = LocalEngine(LLM(model, **options))
        self._begin(client)

    @classmethod
    def connect(cls, address: str) -> AsyncLLM:
        """Use the engine of another process: `address` is that of the `AsyncLLM(process=True)` which started it;
        `shutdown` then ends only this client's requests. EngineError: nothing answers there.
        """
        from inferplane.engine.clients.process.remote import RemoteEngine

        llm = cls.__new__(cls)
        llm._begin(RemoteEngine.connect(address))
        return llm

    def _begin(self, client: EngineClient) -> None:
        """Start with a client, and no live streams."""
        self._client = client
        self._ids = count()
        self._streams = Streams(client)
        self._loading = threading.Lock()  # guards the tokenizer
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
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer(self.info.folder, self.info.tokenizer, self.info.max_model_len)
                self._tokenizer.model_name = self.info.name
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
        """Where other processes of the same user reach the engine (`AsyncLLM.connect`); "" if it runs in a thread."""
        return str(getattr(self._client, "address", ""))

    # -- requests

    @check_keywords
    async def generate(
        self,
        prompt: arguments.Prompt,
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
            index: which of several sequences for this prompt: each has other random numbers from the same seed. For
                `params.n` sequences start n streams.
            priority: lower runs first.
            tenant: cached prefixes are shared within one only.

        Raises:
            UsageError, CapacityError: the request was rejected; nothing of it remains.
            EngineError: the engine has ended.
        """
        pieces: asyncio.Queue[Delta] = asyncio.Queue()
        submission = await self._submission(prompt, params, index, priority, tenant)
        with self._streams.open(request_id, submission, pieces.put_nowait) as stream:
            late = await stream.submit()
            if late is not None:
                yield late
                return
            ended = False
            while not ended:
                piece = await pieces.get()
                ended = piece.finish_reason is not None
                yield piece

    chat = stream_reply

    @check_keywords
    async def embed(
        self,
        prompt: arguments.Prompt,
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
        arguments.as_bool("normalize", normalize)
        check_dimensions(dimensions, self.info.width)
        vector, error, params = None, "", embedding_params(pooling)
        async for piece in self.generate(prompt, params, request_id, priority=priority, tenant=tenant):
            vector, error = piece.embedding, piece.error + piece.error_place
        return finish_embedding(vector, dimensions, normalize=normalize, error=error)

    @old_keywords(take="on_piece", alone="exclusive_id")
    async def feed(
        self,
        on_piece: OnPiece,
        prompt: arguments.Prompt,
        params: SamplingParams | None = None,
        request_id: RequestId | None = None,
        *,
        index: int = 0,
        priority: int = 0,
        tenant: str = "",
        exclusive_id: str = "",
        on_released: Callable[[], None] = lambda: None,
    ) -> None:
        """Continue one prompt like `generate`, but pass each piece to a function in the caller's loop, without a switch
        of tasks: for servers with many streams. Returns after the last piece; cancelling it ends the request.

        Args:
            on_piece: called with each piece. It must not raise; if it does, so does this method, and the request ends.
            exclusive_id: rejected while another live request of this tenant has the same id, also one of another
                process over the same engine; "" disables the check.
            on_released: called once in the caller's loop, when the engine holds nothing of the request any more. After
                a cancellation that is when the engine has confirmed the end, or has died, so it may be never.

        Raises:
            As `generate`.
        """
        try:
            submission = await self._submission(prompt, params, index, priority, tenant, exclusive_id)
        except BaseException:
            on_released()
            raise
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def receive(piece: Delta) -> None:
            if done.done():
                return
            try:
                on_piece(piece)
            except Exception as error:
                done.set_exception(error)
            else:
                if piece.finish_reason is not None:
                    done.set_result(None)

        with self._streams.open(request_id, submission, receive, on_released) as stream:
            try:
                late = await stream.submit()
                if late is not None:
                    receive(late)
                await done
            finally:
                done.cancel()

    async def _submission(
        self, prompt: Any, params: SamplingParams | None, index: int, priority: int, tenant: str, exclusive_id: str = ""
    ) -> Submission:
        """Check the arguments of a request, encode its prompt, and give it an id of the engine."""
        params = arguments.as_sampling_params(params)
        for name, value in (("tenant", tenant), ("exclusive_id", exclusive_id)):
            if not isinstance(value, str):
                raise UsageError(f"{name} = {value!r:.80}.", there_is="strings")
        index = arguments.as_integer("index", index, 0, arguments.MAX_INTEGER)
        priority = arguments.as_integer("priority", priority, arguments.MIN_PRIORITY, arguments.MAX_INTEGER)
        if params.n > 1:
            remedy = "start n streams with n = 1 and index = 0 to n - 1"
            raise UsageError(f"generate with n = {params.n}.", remedy=remedy)
        ids = await self._encode(prompt)
        arguments.check_ids(ids, self.info.vocab)
        # The engine's id is another than the caller's, who may use an id again while an abandoned request still ends.
        names = "".join(tenant), "".join(exclusive_id)  # plain strings, also from an enumeration
        return Submission(next(self._ids), ids, params, index, priority, *names)

    def abort(self, request_id: RequestId) -> None:
        """End a request; its stream gets a last piece with "abort". Unknown and ended ids are ignored."""
        self._streams.abort(request_id)

    async def _encode(self, prompt: arguments.Prompt) -> list[int]:
        """Token ids of a prompt; a prompt of `LONG_PROMPT` characters, or the first one, is encoded in a thread."""
        prompt = arguments.as_prompt(prompt)
        if not isinstance(prompt, str):
            return [i.item() if hasattr(i, "item") else i for i in prompt]
        if self._tokenizer is not None and len(prompt) < LONG_PROMPT:
            return self._tokenizer.encode(prompt)
        return await asyncio.to_thread(lambda: self.tokenizer.encode(prompt))

    # -- the engine

    async def stats(self) -> dict[str, Any]:
        """Counters, gauges and histograms of the engine (`inferplane.engine.loop.metrics`)."""
        return await self._inspect("stats")

    async def explain(self) -> dict[str, Any]:
        """The plan as data: see `LLM.explain`."""
        return await self._inspect("explain")

    async def health(self, timeout_s: float = 2.0) -> Health:
        """Whether the engine makes progress; not alive if it does not answer within `timeout_s`. Never raises."""
        try:
            return Health(**await asyncio.wait_for(self._inspect("health"), timeout_s))
        except asyncio.TimeoutError:
            return Health(alive=False, failure=f"no answer within {timeout_s:g} s")
        except Exception as error:  # of an InferplaneError without its remedy: callers know what to do
            failure = error.what.rstrip(".") if isinstance(error, InferplaneError) else str(error)
            return Health(alive=False, failure=failure)

    async def _inspect(self, question: Question) -> dict[str, Any]:
        return await asyncio.wrap_future(self._client.inspect(question))

    async def shutdown(self, drain_s: float = 0.0, *, kill_s: float | None = None) -> None:
        """Reject new requests, let live ones run for up to `drain_s` seconds, abort the rest, free the model. With
        `process=True` the engine ends for all its callers; after `connect`, only this client's requests end.

        Args:
            drain_s: see above.
            kill_s: seconds beyond `drain_s` after which the engine's process is killed if it has not ended, for example
                because it is stopped. None: 30 to close, and as many to exit. Without effect on an engine in a thread.
        """
        await asyncio.to_thread(self._client.close, drain_s, kill_s)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *unused: object) -> None:
        await self.shutdown()
