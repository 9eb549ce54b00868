"""An engine in a thread of this process. Only that thread touches it: requests and aborts reach it through a queue."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from inferplane.engine.clients.client import Health, ModelInfo, Order, Question, RequestId, Sink
from inferplane.engine.clients.llm import LLM
from inferplane.engine.request.results import Delta, FinishReason
from inferplane.engine.request.state import Request
from inferplane.engine.sampling.grammars import Constraint
from inferplane.errors import EngineError, UsageError

_Key = tuple[Sink, RequestId]
REST_S = 0.2
"""Seconds without work after which an engine counts as at rest."""


@dataclass
class _Stream:
    """A request with the way back to its caller."""

    request: Request
    order: Order
    sink: Sink
    sent: int = 0


class LocalEngine:
    """An `EngineClient` for a model in this process.

    Args:
        llm: the model; owned from here on.
        rest: called in the engine's thread when it has come to rest after some steps.
    """

    def __init__(self, llm: LLM, rest: Callable[[], object] | None = None) -> None:
        self.llm = llm
        self._rest, self._rested = rest, 0
        self.info = model_info(llm)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[_Key, _Stream] = {}
        self._of: dict[Request, _Stream] = {}
        self._alone: set[tuple[str, str]] = set()  # tenant and `alone` of live requests
        self._compiling: dict[_Key, bool] = {}  # constraint at work -> aborted meanwhile
        self._lock = threading.Lock()  # of what is compiling
        self._compilers = ThreadPoolExecutor(2, "inferplane-constraints")
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._turned = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="inferplane-engine", daemon=True)
        self._thread.start()

    # -- for callers

    def submit(self, order: Order, sink: Sink) -> Future[None]:
        """See `EngineClient`. A constraint is compiled beside the engine, which goes on meanwhile."""
        answer, arrived = Future[None](), time.monotonic()
        if order.params.constraint is None:
            self._post(lambda: self._add(order, sink, None, arrived), answer)
            return answer
        with self._lock:
            self._compiling[sink, order.request_id] = False
        try:
            self._compilers.submit(self._compile, order, sink, arrived, answer)
        except RuntimeError:  # closed; the engine's own refusal says so
            self._post(lambda: self._add(order, sink, None, arrived), answer)
        return answer

    def abort(self, request_id: RequestId, sink: Sink) -> None:
        """See `EngineClient`."""
        self._inbox.put(lambda: self._abort((sink, request_id)))

    def abort_all(self, sink: Sink) -> None:
        """End every request of a caller who is gone, those that still wait in the queue too."""

        def work() -> None:
            with self._lock:
                keys = [*self._streams, *self._compiling]
            for key in keys:
                if key[0] is sink:
                    self._abort(key)

        self._inbox.put(work)

    def ask(self, question: Question) -> Future[dict[str, Any]]:
        """See `EngineClient`. Health is answered at once, also by an engine that is stuck."""
        answer: Future[dict[str, Any]] = Future()
        if question == "health":
            answer.set_result(asdict(self._health()))
        elif question == "explain":
            self._post(self.llm.explain, answer)
        else:
            self._post(self.llm.engine.stats, answer)
        return answer

    def close(self, drain_s: float = 0.0) -> None:
        """See `EngineClient`."""
        self._closing.set()
        limit = time.monotonic() + drain_s
        while self._streams and not self._ended.is_set() and time.monotonic() < limit:
            time.sleep(0.01)
        self._inbox.put(None)
        self._thread.join()
        self._compilers.shutdown(cancel_futures=True)
        self.llm.close()

    def _health(self) -> Health:
        engine = self.llm.engine
        alive = not self._ended.is_set() and not self._closing.is_set()
        said = "" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"
        quiet = time.monotonic() - self._turned
        return Health(alive, engine.busy, engine.metrics.counters["steps_total"], quiet, said)

    def _post(
        self, work: Callable[[], Any], answer: Future[Any], given_up: Callable[[], object] = lambda: None
    ) -> None:
        """Run `work` in the engine's thread; its result is the answer. When nobody waits for that, `given_up` runs."""

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                given_up()
                return
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)

        self._inbox.put(run)
        if self._ended.is_set():  # it may have ended just before: then nobody empties the queue but us
            self._refuse()

    def _compile(self, order: Order, sink: Sink, arrived: float, answer: Future[None]) -> None:
        """In a compiler's thread."""
        params, constraint = order.params, None
        try:
            if self._compiling.get((sink, order.request_id)) or (
                params.timeout_s is not None and time.monotonic() - arrived >= params.timeout_s
            ):  # nobody waits for it: it is queued without, and ends before it runs
                order = replace(order, params=replace(params, json_schema=None, regex=None, grammar=None))
            else:
                constraint = self.llm.constraint(params)
        except BaseException as error:
            self._compiled((sink, order.request_id))
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
            return
        self._post(
            lambda: self._add(order, sink, constraint, arrived),
            answer,
            lambda: self._compiled((sink, order.request_id)),
        )

    def _compiled(self, key: _Key) -> bool:
        """Its constraint is not at work any more; whether the request was aborted meanwhile."""
        with self._lock:
            return self._compiling.pop(key, False)

    # -- in the engine's thread

    def _add(self, order: Order, sink: Sink, constraint: Constraint | None, arrived: float) -> None:
        key = sink, order.request_id
        aborted = self._compiled(key)
        if self._ended.is_set() or self._closing.is_set():
            if self._failure is not None:
                raise EngineError(f"The engine stopped: {self._failure}.", remedy="make a new AsyncLLM")
            raise UsageError("The model is shut down.", remedy="make a new AsyncLLM")
        if key in self._streams:
            raise UsageError(f"Request {order.request_id!r} is alive already.", remedy="use another request_id")
        alone = order.tenant, order.alone
        if order.alone and alone in self._alone:
            raise UsageError(f"A request {order.alone!r} is alive already.", remedy="use another id")
        more = {"priority": order.priority, "tenant": order.tenant, "constraint": constraint, "arrived": arrived}
        request = self.llm.add(order.prompt, order.params, order.index, **more)
        self._streams[key] = self._of[request] = _Stream(request, order, sink)
        if order.alone:
            self._alone.add(alone)
        if aborted:
            self._abort(key)

    def _abort(self, key: _Key) -> None:
        with self._lock:
            if key in self._compiling:
                self._compiling[key] = True
        stream = self._streams.get(key)
        if stream is not None:
            self._end(stream, "abort")

    def _end(self, stream: _Stream, reason: FinishReason, error: str = "") -> None:
        self.llm.engine.end(stream.request, reason, error)
        try:
            piece = self._piece(stream)
        except Exception as failure:
            piece = self._lost(stream, f"{error} {type(failure).__name__}: {failure}".strip())
        if piece is not None:
            self._deliver(stream.sink, [(stream.order.request_id, piece)])

    def _lost(self, stream: _Stream, said: str) -> Delta:
        """The last piece of a stream of which something is lost: it fails, even if its tokens were all made."""
        self.llm.engine.end(stream.request, "error", said)
        self._forget(stream)
        return Delta("", [], "error", None, said)

    def _deliver(self, sink: Sink, pieces: list[tuple[RequestId, Delta]]) -> None:
        """Hand pieces over. When that fails they are lost: their requests end, and that much is told."""
        try:
            sink.deliver(pieces)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            for request_id, _ in pieces:
                stream = self._streams.get((sink, request_id))
                if stream is not None:
                    self._lost(stream, said)
            sink.deliver([(request_id, Delta("", [], "error", None, said)) for request_id, _ in pieces])

    def _piece(self, stream: _Stream) -> Delta | None:
        """What is new since the last piece; the last one ends the stream."""
        request = stream.request
        reason, new = request.finish_reason, request.generated[stream.sent :]
        if reason is None and not new:
            return None
        scored = None if request.logprobs is None else request.logprobs[stream.sent :]
        prompt = request.prompt_logprobs if stream.sent == 0 else None
        stream.sent += len(new)
        text = request.text.take(end=reason is not None) if request.text is not None else ""
        timings = request.timings() if reason is not None else None
        if reason is not None:
            self._forget(stream)
        return Delta(text, new, reason, timings, request.error, scored, prompt, request.embedding)

    def _step(self) -> None:
        """One step of the engine; each caller hears once of all that is new."""
        pieces: dict[Sink, list[tuple[RequestId, Delta]]] = {}
        for request in self.llm.engine.step():
            stream = self._of.get(request)
            if stream is None:
                continue
            try:
                piece = self._piece(stream)
            except Exception as error:
                piece = self._lost(stream, f"{type(error).__name__}: {error}")
            if piece is not None:
                pieces.setdefault(stream.sink, []).append((stream.order.request_id, piece))
        for sink, found in pieces.items():
            self._deliver(sink, found)

    def _forget(self, stream: _Stream) -> None:
        self._streams.pop((stream.sink, stream.order.request_id), None)
        self._of.pop(stream.request, None)
        self._alone.discard((stream.order.tenant, stream.order.alone))

    def _next(self) -> Callable[[], None] | None:
        """What comes next through the queue; None is its end."""
        steps = self.llm.engine.metrics.counters["steps_total"]
        if self._rest is not None and steps != self._rested:
            try:
                return self._inbox.get(timeout=REST_S)
            except queue.Empty:
                self._rested = steps
                self._rest()
        return self._inbox.get()

    def _loop(self) -> None:
        engine = self.llm.engine
        try:
            while True:
                while not engine.busy or not self._inbox.empty():
                    work = self._next()
                    self._turned = time.monotonic()
                    if work is None:
                        return
                    work()
                self._step()
                self._turned = time.monotonic()
        except BaseException as error:
            self._failure = error
        finally:
            self._ended.set()
            reason: FinishReason = "abort" if self._failure is None else "error"
            said = "" if self._failure is None else f"the engine stopped: {self._failure}"
            for stream in list(self._streams.values()):
                with contextlib.suppress(Exception):  # a caller who cannot be told keeps nobody else from being told
                    self._end(stream, reason, said)
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


def model_info(llm: LLM) -> ModelInfo:
    """What callers may know of a loaded model."""
    runner, engine = llm.runner, llm.engine
    architectures = llm.files.config.get("architectures") or [""]
    return ModelInfo(
        name=llm.files.name,
        folder=str(llm.files.folder) if llm.files.folder is not None else None,
        architecture=str(architectures[0]),
        device=runner.backend.name,
        device_name=runner.state.name if runner.state is not None else "",
        dtype=str(runner.dtype).removeprefix("torch."),
        kv_dtype=runner.options.kv_dtype,
        vocab=engine.vocab,
        width=runner.model.embed.weight.shape[1],
        max_model_len=runner.max_model_len,
        max_batch=engine.scheduler.limits.max_batch,
        kv_blocks=engine.cache.blocks,
        block_tokens=engine.cache.block_tokens,
        end_ids=tuple(sorted(llm.end_ids())),
        speculative=engine.speculator.config.speculate_method if engine.speculator is not None else "",
    )
