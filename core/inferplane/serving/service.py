"""The server without a wire format: between the formats and the engine.

States: "loading" -> "serving" -> "draining" -> "ended"; "failed" when the model cannot be loaded or the engine died.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from inferplane.errors import CapacityError, UsageError
from inferplane.serving.admission import (
    Deadline,
    GenerateCall,
    PromptLimits,
    build_sampling_params,
    check_num_sequences,
)
from inferplane.serving.bodies import BodyMemory, HeldMemory
from inferplane.serving.errors import ApiError, invalid
from inferplane.serving.generation import Generation
from inferplane.serving.large_bodies.threads import BodyThreads
from inferplane.serving.model import ServedModel
from inferplane.serving.settings import ServerSettings
from inferplane.serving.shared_state.counters import (
    ABORTED,
    ACCEPTED,
    ENDED,
    IGNORED_FIELDS,
    REJECTED,
    RequestCounters,
)
from inferplane.serving.shared_state.loop_lag import NOT_READY_S, LoopLag
from inferplane.serving.shared_state.slots import SequenceSlots, SlotReservation
from inferplane.serving.threads import run_in_daemon_thread
from inferplane.serving.wire import RequestBody, unknown_fields

if TYPE_CHECKING:
    from inferplane.engine import AsyncLLM
    from inferplane.serving.tracing import Tracer

Result = TypeVar("Result")
State = Literal["loading", "serving", "draining", "ended", "failed"]
HEALTH_EVERY_S = 0.5
HEALTH_ANSWER_S = 2.0
END_S, KILL_S = 4.0, 1.5
"""Seconds beyond draining within which the server has ended, whatever its engine does, and in which the engine's
process has to end; then it is killed."""
FLUSH_S = 0.7
"""Seconds of `END_S` that are kept for what comes after the ends of aborted requests, which clients read until then."""
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
        self.loop_lag = LoopLag(self.counters.set_loop_lag)
        self.body_memory = BodyMemory(settings.max_held_bytes)
        self.failure = ""
        self.failed, self.serving = asyncio.Event(), asyncio.Event()
        self.started = time.monotonic()
        self.end_workers: Callable[[float], Awaitable[None]] | None = None
        """Lets the other processes drain for some seconds and waits for their end; None without other processes."""
        self.end_at = 0.0
        """When the process has to end, on the monotonic clock; set when it begins to drain."""
        self._silent_since: float | None = None
        self._stalled = ""
        self._ids = count()
        self._generations: set[Generation] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._encoders = ThreadPoolExecutor(2, thread_name_prefix="inferplane-encode")
        self._bodies = BodyThreads(settings.max_body_bytes)

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
            try:
                await engine.shutdown()
            finally:  # last: the process ends then, and reports what this task has raised
                self._fail(f"{type(error).__name__}: {error}")
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
        limit = time.monotonic() + (0.0 if failed else drain_s)
        self.end_at = limit + END_S
        while self._generations and time.monotonic() < limit:
            await asyncio.sleep(0.02)
        if workers is not None:
            await workers  # they use the engine, too
        if self._watcher is not None:
            self._watcher.cancel()
        if self.engine is not None:
            await self.engine.shutdown(kill_s=KILL_S)
        while self._generations and self.left_s > FLUSH_S:
            await asyncio.sleep(0.02)
        if self.model is not None:
            await self.model.close()
        self._encoders.shutdown(wait=False, cancel_futures=True)
        await self._bodies.close()
        self.state = "ended"

    @property
    def left_s(self) -> float:
        """Seconds that are left until the process has to end, once it drains."""
        return max(self.end_at - time.monotonic(), 0.0)

    def condition(self) -> Condition:
        """Return the server's health, without waiting."""
        if self.state == "serving" and self._stalled:
            return Condition(self._silent_since is None, False, "stalled", self._stalled)
        return Condition(self.state not in ("failed", "ended"), self.state == "serving", self.state, self.failure)

    def condition_outside(self) -> Condition:
        """Return the server's health as another thread than the event loop's sees it: a loop that is stuck counts.

        The server is not ready after `NOT_READY_S`, and not live after `stall_s`, if that is longer.
        """
        condition, stuck_s = self.condition(), self.loop_lag.stuck_s
        if stuck_s < NOT_READY_S:
            return condition
        live = condition.live and stuck_s < max(self.settings.stall_s, NOT_READY_S)
        return Condition(live, False, "stalled", condition.detail or f"the event loop is stuck for {stuck_s:.1f} s")

    def _fail(self, why: str) -> None:
        self.state, self.failure = "failed", why
        self.failed.set()

    async def _watch_engine(self, engine: AsyncLLM) -> None:
        """Keep `condition` up to date with the engine's health."""
        while True:
            requested_at = time.monotonic()
            health = await engine.health(HEALTH_ANSWER_S)
            took = time.monotonic() - requested_at
            if health.alive:
                self._silent_since = None
                stuck = not health.is_ready(self.settings.stall_s)
                self._stalled = f"no step ended for {health.quiet_s:.1f} s" if stuck else ""
            elif took < HEALTH_ANSWER_S:
                log.critical("engine died", extra={"facts": {"why": health.failure}})
                self._fail(f"the engine died: {health.failure}")
                return
            else:
                self._silent_since = self._silent_since or requested_at
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
                self.slots.acquire(num_sequences - held, call.key)
            except ApiError:
                self.slots.release(held, call.key)
                raise
        generation: Generation | None = None
        try:
            deadline = call.deadline or Deadline(self.settings.request_timeout_s, call.timeout_s)
            generation = await deadline.enforce(self._accept(replace(call, deadline=deadline), model, deadline))
            yield generation
        except ApiError as error:
            if generation is None or generation.refusal is error:
                self.count_refusal(error)
            raise
        finally:
            release = partial(self.slots.release, num_sequences, call.key)
            if generation is None:
                release()
            else:
                try:
                    await generation.close(release)  # no other request may use what the engine still holds
                finally:
                    self._generations.discard(generation)
                    self.slots.usage.add_request(call.key, generation.prompt_tokens + generation.completion_tokens)
                    self._count_end(generation)

    async def _accept(self, call: GenerateCall, model: ServedModel, deadline: Deadline) -> Generation:
        word = call.word("prompt")
        prompts = [
            await self.encode(p, special=call.special, word=word) if isinstance(p, str) else p for p in call.prompts
        ]
        params = [build_sampling_params(call, ids, self.settings, model.info) for ids in prompts]
        assert self.engine is not None
        generation = Generation(self.engine, call, prompts, params, f"job-{next(self._ids)}", deadline)
        generation.start()
        self._generations.add(generation)
        self.counters.add(ACCEPTED, call.operation)
        return generation

    async def encode(self, text: str, *, special: bool = True, word: str = "prompt") -> list[int]:
        """Return the token ids of a text. Long texts are encoded in a thread, so that other requests go on.

        Args:
            text: the text.
            special: with the special tokens that the model expects around a text.
            word: the wire format's name of the text, for errors.

        Raises:
            ApiError: the text cannot be encoded, or has more tokens than a sequence may have.
        """
        encode = self.ready_model.encode
        try:
            if len(text) < 4096:
                return encode(text, special)
            return await asyncio.get_running_loop().run_in_executor(self._encoders, encode, text, special)
        except UsageError as error:
            raise invalid(error.what, word) from error
        except CapacityError as error:
            raise invalid(error.what, word, "context_length_exceeded") from error

    @property
    def prompt_limits(self) -> PromptLimits:
        """What this server allows of prompts; raises ApiError 503 while no model accepts requests."""
        return PromptLimits.of(self.settings, self.ready_model.info)

    async def read_json(self, path: str, body: bytes, held: HeldMemory) -> dict[str, Any]:
        """Return a body as a JSON object. Another process parses and checks a large one first, and this then raises
        what reading its fields would raise.

        Args:
            path: a route of `body_checks.READ`.
            body: as it arrived.
            held: gets what the values of a large body take; the gate has charged a small one.

        Raises:
            ApiError: it is invalid, or InvalidBody; 503, there is no memory for it, or the other process failed.
        """
        return await self._bodies.read_json(path, body, held, lambda: self.prompt_limits)

    async def read(self, num_bytes: int, function: Callable[..., Result], *args: Any) -> Result:
        """Return what a function makes of a body of so many bytes, or of its values. For large bodies it runs in a
        thread, one at a time: C code keeps Python's lock, so that two would stop the loop for twice as long.
        """
        return await self._bodies.read(num_bytes, function, *args)

    def count_ignored(self, request: RequestBody, more: Sequence[str] = ()) -> list[str]:
        """Count and return what of a request has no effect: its unknown fields, and `more`.

        Raises:
            ApiError: 400, the setting `strict_fields` refuses unknown fields.
        """
        names = unknown_fields(request)
        unread = [*names, *(name for name in more if name.startswith("messages["))]
        if unread and self.settings.strict_fields:
            raise invalid(f"{unread[0][:100]!r} is no field of this request.", unread[0][:100], "unsupported")
        for name in (*names, *more):
            self.counters.add(IGNORED_FIELDS, name)
        return [*names, *more]

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

    def _count_end(self, generation: Generation) -> None:
        self.counters.add(ENDED, generation.outcome)
        unfinished = generation.num_choices - len(generation.finish_reasons)
        if unfinished and generation.outcome == "disconnect":
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
