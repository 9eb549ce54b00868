"""The server without a wire format: between the formats and the engine.

States: "loading" -> "serving" -> "draining" -> "ended"; "failed" when the model cannot be loaded or the engine died.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from inferplane.errors import UsageError
from inferplane.serving.admission import GenerateCall, build_sampling_params, check_num_sequences
from inferplane.serving.errors import ApiError, invalid
from inferplane.serving.generation import Generation
from inferplane.serving.model import ServedModel
from inferplane.serving.settings import ServerSettings
from inferplane.serving.shared_state.counters import ABORTED, REJECTED, RequestCounters
from inferplane.serving.shared_state.slots import SequenceSlots, SlotReservation
from inferplane.serving.threads import run_in_daemon_thread

if TYPE_CHECKING:
    from inferplane.engine import AsyncLLM
    from inferplane.serving.tracing import Tracer

State = Literal["loading", "serving", "draining", "ended", "failed"]
HEALTH_EVERY_S = 0.5
HEALTH_ANSWER_S = 2.0
FLUSH_S = 5.0
"""Seconds in which clients can read the end of an aborted request."""
log = logging.getLogger("inferplane.serving")


@dataclass(frozen=True)
class Condition:
    """The server's health.

    Args:
        live: the process need not be restarted.
        ready: it accepts requests, and they make progress.
        status: the service's state, or "stalled".
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
        slots: for sequences that run or wait; None: as many as the settings say, for this process alone.
        tracer: makes spans of requests; None: no spans.
        counters: of refused and aborted requests; None: for this process alone.
    """

    def __init__(
        self,
        settings: ServerSettings,
        slots: SequenceSlots | None = None,
        tracer: Tracer | None = None,
        counters: RequestCounters | None = None,
    ) -> None:
        self.settings, self.tracer = settings, tracer
        self.state: State = "loading"
        self.model: ServedModel | None = None
        self.engine: AsyncLLM | None = None
        self.slots = slots or SequenceSlots(settings.max_num_seqs + settings.max_waiting)
        self.counters = counters or RequestCounters()
        self.failure = ""
        self.failed, self.serving = asyncio.Event(), asyncio.Event()
        self.started = time.monotonic()
        self.end_workers: Callable[[float], Awaitable[None]] | None = None
        """Lets the other processes drain for some seconds and waits for their end; None without other processes."""
        self._silent_since: float | None = None
        self._stalled = ""
        self._ids = count()
        self._generations: set[Generation] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._encoders = ThreadPoolExecutor(2, thread_name_prefix="inferplane-encode")

    # -- life

    async def load(self, open_engine: Callable[[], AsyncLLM]) -> None:
        """Open the engine in a thread, then serve. If that raises, the state is "failed"."""
        try:
            engine = await asyncio.wrap_future(run_in_daemon_thread(open_engine, "load"))
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
            raise
        if self.state != "loading":  # drained meanwhile
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
        self._watcher = asyncio.create_task(self._watch_engine(engine))

    async def drain(self, drain_s: float) -> None:
        """Refuse new requests, wait `drain_s` seconds for running ones, then abort the rest with a terminal event."""
        if self.state in ("draining", "ended"):
            return
        failed, self.state = self.state == "failed", "draining"
        workers = asyncio.ensure_future(self.end_workers(0.0 if failed else drain_s)) if self.end_workers else None
        limit = time.monotonic() + drain_s
        while self._generations and time.monotonic() < limit and not failed:
            await asyncio.sleep(0.02)
        if workers is not None:
            await workers  # they use the engine, too
        if self._watcher is not None:
            self._watcher.cancel()
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
        """Return the server's health, without waiting."""
        if self.state == "serving" and self._stalled:
            return Condition(self._silent_since is None, False, "stalled", self._stalled)
        return Condition(self.state not in ("failed", "ended"), self.state == "serving", self.state, self.failure)

    def _fail(self, why: str) -> None:
        self.state, self.failure = "failed", why
        self.failed.set()

    async def _watch_engine(self, engine: AsyncLLM) -> None:
        """Keep `condition` up to date with the engine's health."""
        while True:
            asked_at = time.monotonic()
            health = await engine.health(HEALTH_ANSWER_S)
            took = time.monotonic() - asked_at
            if health.alive:
                self._silent_since = None
                stuck = not health.ready(self.settings.stall_s)
                self._stalled = f"no step ended for {health.quiet_s:.1f} s" if stuck else ""
            elif took < HEALTH_ANSWER_S:
                log.critical("engine died", extra={"facts": {"why": health.failure}})
                self._fail(f"the engine died: {health.failure}")
                return
            else:
                self._silent_since = self._silent_since or asked_at
                if time.monotonic() - self._silent_since >= self.settings.stall_s:
                    self._stalled = health.failure
            await asyncio.sleep(HEALTH_EVERY_S)

    # -- requests

    @property
    def ready_model(self) -> ServedModel:
        """The model; raises ApiError 503 while no model accepts requests."""
        if self.state == "loading":
            raise ApiError(503, "The model is being loaded.", code="loading", retry_after_s=2)
        if self.state == "failed":
            raise ApiError(503, "The server has failed and is about to end.", code="failed", retry_after_s=10)
        if self.state != "serving" or self.model is None:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", retry_after_s=5)
        return self.model

    def admit(
        self, call: GenerateCall, reservation: SlotReservation | None = None
    ) -> AbstractAsyncContextManager[Generation]:
        """Accept a request and start it. Leaving the context aborts the sequences that still run.

        Args:
            call: the request.
            reservation: a slot that was acquired for it already.

        Raises:
            ApiError: it is refused, and holds nothing.
        """
        admitted = self._admit(call, reservation)
        if self.tracer is None or self.model is None:
            return admitted
        return self.tracer.trace_generation(call, self.model.names[0], admitted)

    @asynccontextmanager
    async def _admit(self, call: GenerateCall, reservation: SlotReservation | None) -> AsyncIterator[Generation]:
        with self.count_refusals():
            model = self.ready_model
            num_sequences = check_num_sequences(call, self.settings, self.slots.max_sequences)
            held = reservation.transfer() if reservation is not None else 0
            try:
                self.slots.acquire(num_sequences - held)
            except ApiError:
                self.slots.release(held)
                raise
        generation: Generation | None = None
        try:
            generation = await self._accept(call, model)
            yield generation
        except ApiError as error:
            if generation is None or generation.refusal is error:
                self.count_refusal(error)
            raise
        finally:
            try:
                if generation is not None:
                    await generation.close()
            finally:
                self.slots.release(num_sequences)
                if generation is not None:
                    self._generations.discard(generation)
                    self._count_aborted(generation)

    async def _accept(self, call: GenerateCall, model: ServedModel) -> Generation:
        prompts = [await self.encode(p, special=call.special) if isinstance(p, str) else p for p in call.prompts]
        params = [build_sampling_params(call, ids, self.settings, model.info) for ids in prompts]
        assert self.engine is not None
        generation = Generation(self.engine, call, prompts, params, f"job-{next(self._ids)}")
        generation.start()
        self._generations.add(generation)
        return generation

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text. Long texts are encoded in a thread, so that other requests go on.

        Raises:
            ApiError: the text cannot be encoded.
        """
        encode = self.ready_model.encode
        try:
            if len(text) < 4096:
                return encode(text, special)
            return await asyncio.get_running_loop().run_in_executor(self._encoders, encode, text, special)
        except UsageError as error:
            raise invalid(error.what, "prompt") from error

    def count_refusal(self, error: ApiError) -> None:
        """Count a refused request."""
        self.counters.add(REJECTED, error.code)

    @contextmanager
    def count_refusals(self) -> Iterator[None]:
        """Count an ApiError that is raised inside. `admit` counts its own."""
        try:
            yield
        except ApiError as error:
            self.count_refusal(error)
            raise

    def _count_aborted(self, generation: Generation) -> None:
        unfinished = generation.num_choices - len(generation.finish_reasons)
        if unfinished and generation.refusal is None:  # the client left before their end
            self.counters.add(ABORTED, "disconnect", unfinished)

    # -- numbers

    async def stats(self) -> dict[str, Any]:
        """Return the engine's numbers; empty while no engine answers."""
        if self.engine is None or self.state in ("failed", "ended"):
            return {}
        try:
            return await asyncio.wait_for(self.engine.stats(), HEALTH_ANSWER_S)
        except Exception as error:
            log.warning("no numbers from the engine", extra={"facts": {"why": type(error).__name__}})
            return {}
