"""The server without a wire: what stands between the formats and the engine.

States: "loading" -> "serving" -> "draining" -> "ended"; "failed" when the model cannot be loaded or the engine died.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from inferplane.errors import UsageError
from inferplane.serving.admission import GenerateCall, build_sampling_params, check_fan_out
from inferplane.serving.counters import ABORTED, REJECTED, RequestCounters
from inferplane.serving.errors import ApiError, invalid
from inferplane.serving.generation import Generation
from inferplane.serving.model import ServedModel
from inferplane.serving.settings import ServerSettings
from inferplane.serving.slots import SequenceSlots, SlotReservation

if TYPE_CHECKING:
    from inferplane.engine import AsyncLLM
    from inferplane.serving.tracing import Tracer

State = Literal["loading", "serving", "draining", "ended", "failed"]
HEALTH_EVERY_S = 0.5
HEALTH_ANSWER_S = 2.0
FLUSH_S = 5.0
"""Seconds that clients have to read the end of an aborted request."""
log = logging.getLogger("inferplane.serving")


@dataclass(frozen=True)
class Condition:
    """Whether the server does its work.

    Args:
        live: the process is worth keeping.
        ready: it takes requests, and they move.
        status: a word: the service's state, or "stalled".
        detail: why it is not ready.
    """

    live: bool
    ready: bool
    status: str
    detail: str = ""


class Service:
    """One engine with its admission, for any number of front ends on one asyncio loop.

    Args:
        settings: limits and names.
        places: for sequences that run or wait; None: its own, as many as the settings say.
        tracer: makes spans of requests; None: nobody wants them.
        counts: of the whole server, when several processes share them; None: its own.
    """

    def __init__(
        self,
        settings: ServerSettings,
        slots: SequenceSlots | None = None,
        tracer: Tracer | None = None,
        counts: RequestCounters | None = None,
    ) -> None:
        self.settings, self.tracer = settings, tracer
        self.state: State = "loading"
        self.model: ServedModel | None = None
        self.engine: AsyncLLM | None = None
        self.slots = slots or SequenceSlots(settings.max_batch + settings.max_waiting)
        self.counts = counts or RequestCounters()
        self.failure = ""
        self.failed, self.serving = asyncio.Event(), asyncio.Event()
        self.started = time.monotonic()
        self._silent_since: float | None = None
        self._stalled = ""
        self._ids = count()
        self._generations: set[Generation] = set()
        self._watch: asyncio.Task[None] | None = None
        self.others_end: Callable[[float], Awaitable[None]] | None = None
        self._encoders = ThreadPoolExecutor(2, thread_name_prefix="inferplane-encode")

    # -- its life

    async def load(self, open_engine: Callable[[], AsyncLLM]) -> None:
        """Open the engine in a thread, then serve. Whatever it raises leaves the state "failed"."""
        try:
            engine = await _in_daemon(open_engine)
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
            raise
        if self.state != "loading":  # told to end meanwhile
            await engine.shutdown()
            return
        try:
            self.model = await asyncio.to_thread(ServedModel, engine, self.settings)
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
            await engine.shutdown()
            raise
        self.engine = engine
        self.state = "serving"
        self.serving.set()
        self._watch = asyncio.create_task(self._watching(engine))

    async def drain(self, drain_s: float) -> None:
        """Refuse new requests, let those that run end, then abort what is left, each with a terminal event."""
        if self.state in ("draining", "ended"):
            return
        failed, self.state = self.state == "failed", "draining"
        ending = asyncio.ensure_future(self.others_end(0.0 if failed else drain_s)) if self.others_end else None
        limit = time.monotonic() + drain_s
        while self._generations and time.monotonic() < limit and not failed:
            await asyncio.sleep(0.02)
        if ending is not None:
            await ending  # others use the engine, too
        if self._watch is not None:
            self._watch.cancel()
        if self.engine is not None:
            await self.engine.shutdown()
        limit = time.monotonic() + FLUSH_S
        while self._generations and time.monotonic() < limit:
            await asyncio.sleep(0.02)
        if self.model is not None:
            await self.model.close()
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self.state = "ended"

    def condition(self) -> Condition:
        """Whether it does its work; immediate."""
        if self.state == "serving" and self._stalled:
            return Condition(self._silent_since is None, False, "stalled", self._stalled)
        return Condition(self.state not in ("failed", "ended"), self.state == "serving", self.state, self.failure)

    def _fail(self, why: str) -> None:
        self.state, self.failure = "failed", why
        self.failed.set()

    async def _watching(self, engine: AsyncLLM) -> None:
        """Keep `condition` true to the engine."""
        while True:
            asked = time.monotonic()
            health = await engine.health(HEALTH_ANSWER_S)
            took = time.monotonic() - asked
            if health.alive:
                self._silent_since = None
                stuck = not health.ready(self.settings.stall_s)
                self._stalled = f"no step ended for {health.quiet_s:.1f} s" if stuck else ""
            elif took < HEALTH_ANSWER_S:
                log.critical("engine died", extra={"facts": {"why": health.failure}})
                self._fail(f"the engine died: {health.failure}")
                return
            else:
                self._silent_since = self._silent_since or asked
                if time.monotonic() - self._silent_since >= self.settings.stall_s:
                    self._stalled = health.failure
            await asyncio.sleep(HEALTH_EVERY_S)

    # -- requests

    @property
    def served(self) -> ServedModel:
        """The model; ApiError 503 while there is none that takes requests."""
        if self.state == "loading":
            raise ApiError(503, "The model is being loaded.", code="loading", retry_after_s=2)
        if self.state == "failed":
            raise ApiError(503, "The server has failed and is about to end.", code="failed", retry_after_s=10)
        if self.state != "serving" or self.model is None:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", retry_after_s=5)
        return self.model

    def admit(
        self, ask: GenerateCall, reserved: SlotReservation | None = None
    ) -> AbstractAsyncContextManager[Generation]:
        """Accept a request and start it; leaving the context ends what still runs of it.

        Args:
            ask: the request.
            reserved: a place that was taken for it already.

        Raises:
            ApiError: it is refused, and nothing of it remains.
        """
        admitted = self._admit(ask, reserved)
        if self.tracer is None or self.model is None:
            return admitted
        return self.tracer.follow(ask, self.model.names[0], admitted)

    @asynccontextmanager
    async def _admit(self, ask: GenerateCall, reserved: SlotReservation | None) -> AsyncIterator[Generation]:
        try:
            model = self.served
            slots = check_fan_out(ask, self.settings, self.slots.most)
            held = reserved.transfer() if reserved is not None else 0
            try:
                self.slots.take(slots - held)
            except ApiError:
                self.slots.release(held)
                raise
        except ApiError as error:
            self.refused(error)
            raise
        generation: Generation | None = None
        try:
            generation = await self._accept(ask, model)
            yield generation
        except ApiError as error:
            if generation is None or generation.refusal is error:
                self.refused(error)
            raise
        finally:
            try:
                if generation is not None:
                    await generation.close()
            finally:
                self.slots.release(slots)
                if generation is not None:
                    self._generations.discard(generation)
                    self._account(generation)

    async def _accept(self, ask: GenerateCall, model: ServedModel) -> Generation:
        prompts = [await self.encode(p, special=ask.special) if isinstance(p, str) else p for p in ask.prompts]
        limits = self.settings, model.info.max_model_len, model.info.vocab
        params = [build_sampling_params(ask, ids, *limits) for ids in prompts]
        assert self.engine is not None
        generation = Generation(self.engine, ask, prompts, params, f"job-{next(self._ids)}")
        generation.start()
        self._generations.add(generation)
        return generation

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; long ones are encoded beside the loop, so that other requests go on.

        Raises:
            ApiError: the text cannot be encoded.
        """
        encode = self.served.encode
        try:
            if len(text) < 4096:
                return encode(text, special)
            return await asyncio.get_running_loop().run_in_executor(self._encoders, encode, text, special)
        except UsageError as error:
            raise invalid(error.what, "prompt") from error

    def refused(self, error: ApiError) -> None:
        """Count a request that was refused."""
        self.counts.add(REJECTED, error.code)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Refusals inside count. `admit` counts its own."""
        try:
            yield
        except ApiError as error:
            self.refused(error)
            raise

    def _account(self, generation: Generation) -> None:
        gone = generation.choices - len(generation.finished)
        if gone and generation.refusal is None:  # nobody read them to their end
            self.counts.add(ABORTED, "disconnect", gone)

    # -- numbers

    async def stats(self) -> dict[str, Any]:
        """The engine's numbers; empty while there is no engine that answers."""
        if self.engine is None or self.state in ("failed", "ended"):
            return {}
        try:
            return await asyncio.wait_for(self.engine.stats(), HEALTH_ANSWER_S)
        except Exception as error:
            log.warning("no numbers from the engine", extra={"facts": {"why": type(error).__name__}})
            return {}


async def _in_daemon(work: Callable[[], AsyncLLM]) -> AsyncLLM:
    """Run in a thread that does not keep the process from ending: a model may take minutes to load."""
    answer: Future[AsyncLLM] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="inferplane-load", daemon=True).start()
    return await asyncio.wrap_future(answer)
