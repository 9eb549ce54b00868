"""`LocalEngine`: an engine in a thread of this process. Other threads pass it requests and aborts through a queue."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from inferplane.dialogue.replies.catalog import FORMS
from inferplane.engine.clients.client import Health, ModelInfo, Question, RequestId, Sink, Submission
from inferplane.engine.clients.llm import LLM
from inferplane.engine.request.constraint import Constraint
from inferplane.engine.request.results import Delta, FinishReason
from inferplane.engine.request.state import PieceReader, Request
from inferplane.errors import EngineError, UsageError
from inferplane.plugins import host

_Key = tuple[Sink, RequestId]
IDLE_S = 0.2
"""Seconds without work after which an engine counts as idle."""


@dataclass
class _Stream(PieceReader):
    """A request, and where its pieces go."""

    submission: Submission
    sink: Sink


class LocalEngine:
    """An `EngineClient` for a model in this process, whose steps run in a thread of their own.

    Args:
        llm: the model; closed by `close`. From now on only the engine's thread may step it.
        on_idle: called in the engine's thread when there has been no work for `IDLE_S` seconds after some steps, to
            return memory for example.
    """

    def __init__(self, llm: LLM, on_idle: Callable[[], object] | None = None) -> None:
        self.llm = llm
        self._on_idle, self._steps_when_idle = on_idle, 0
        self.info = model_info(llm)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[_Key, _Stream] = {}
        self._by_request: dict[Request, _Stream] = {}
        self._exclusive: set[tuple[str, str]] = set()  # tenant and `exclusive_id` of live requests
        self._compiling: dict[_Key, bool] = {}  # constraints being compiled -> aborted meanwhile
        self._lock = threading.Lock()  # guards `_compiling`
        self._compilers = ThreadPoolExecutor(2, "inferplane-constraints")
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._last_active = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="inferplane-engine", daemon=True)
        self._thread.start()

    # -- for callers

    def submit(self, submission: Submission, sink: Sink) -> Future[None]:
        """See `EngineClient`. A constraint is compiled in another thread, at most two at a time, while the engine goes
        on; the request's `timeout_s` counts from this call.
        """
        answer, arrived = Future[None](), time.monotonic()
        if submission.params.needs_grammar:
            with self._lock:
                self._compiling[sink, submission.request_id] = False
            with contextlib.suppress(RuntimeError):  # closed; the engine's own error says so
                self._compilers.submit(self._compile, submission, sink, arrived, answer)
                return answer
        self._post(lambda: self._add(submission, sink, None, arrived), answer)
        return answer

    def abort(self, request_id: RequestId, sink: Sink) -> None:
        """See `EngineClient`; the engine's thread ends the request before its next step."""
        self._inbox.put(lambda: self._abort((sink, request_id)))

    def abort_all(self, sink: Sink) -> None:
        """End every request submitted with this sink, whose caller has left: also those that wait in the queue or whose
        constraint is being compiled. Returns at once.
        """

        def work() -> None:
            with self._lock:
                keys = [*self._streams, *self._compiling]
            for key in keys:
                if key[0] is sink:
                    self._abort(key)

        self._inbox.put(work)

    def inspect(self, question: Question) -> Future[dict[str, Any]]:
        """See `EngineClient`. "health" is answered at once, even if the engine is stuck; the rest between steps."""
        answer: Future[dict[str, Any]] = Future()
        if question == "health":
            answer.set_result(asdict(self._health()))
        else:
            self._post(self.llm.explain if question == "explain" else self.llm.engine.stats, answer)
        return answer

    def close(self, drain_s: float = 0.0, kill_s: float | None = None) -> None:
        """See `EngineClient`; a thread cannot be killed. It also waits, without a limit, for the step and the
        compilation that run just now.
        """
        self._closing.set()
        limit = time.monotonic() + drain_s
        while self._streams and not self._ended.is_set() and time.monotonic() < limit:
            time.sleep(0.01)
        self._inbox.put(None)
        self._thread.join()
        self._compilers.shutdown(cancel_futures=True)
        self.llm.close()

    def _health(self) -> Health:
        """The state of the engine as seen from any thread, without waiting."""
        engine = self.llm.engine
        alive = not self._ended.is_set() and not self._closing.is_set()
        message = "" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"
        quiet = time.monotonic() - self._last_active
        return Health(alive, engine.busy, engine.metrics.counters["steps_total"], quiet, message)

    def _post(
        self, work: Callable[[], Any], answer: Future[Any], on_cancelled: Callable[[], object] = lambda: None
    ) -> None:
        """Queue `work` for the engine's thread; its result or exception becomes that of `answer`. If `answer` was
        cancelled before, `on_cancelled` runs instead.
        """

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                on_cancelled()
                return
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)

        self._inbox.put(run)
        if self._ended.is_set():  # it may have ended just before, and then does not empty the queue
            self._run_remaining_work()

    def _compile(self, submission: Submission, sink: Sink, arrived: float, answer: Future[None]) -> None:
        """Compile a submission's constraint, in a thread of the pool, then queue the request in the engine's thread.
        Errors go to `answer`. Nothing is compiled for a request that was aborted, or whose time (from `arrived`) is
        over.
        """
        params, constraint = submission.params, None
        try:
            if self._compiling.get((sink, submission.request_id)) or (
                params.timeout_s is not None and time.monotonic() - arrived >= params.timeout_s
            ):  # the result is not needed: queued without a constraint, it ends before it runs
                submission = replace(submission, params=params.without_grammars)
            else:
                constraint = self.llm.constraint(params)
        except BaseException as error:
            self._end_compiling((sink, submission.request_id))
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
            return
        self._post(
            lambda: self._add(submission, sink, constraint, arrived),
            answer,
            lambda: self._end_compiling((sink, submission.request_id)),
        )

    def _end_compiling(self, key: _Key) -> bool:
        """Note that a request's constraint is no longer being compiled; returns whether the request was aborted
        meanwhile.
        """
        with self._lock:
            return self._compiling.pop(key, False)

    # -- in the engine's thread

    def _add(self, submission: Submission, sink: Sink, constraint: Constraint | None, arrived: float) -> None:
        """Queue a request in the engine and register its stream, in the engine's thread; raises the error that rejects
        it.
        """
        key = sink, submission.request_id
        aborted = self._end_compiling(key)
        if self._ended.is_set() or self._closing.is_set():
            if self._failure is not None:
                raise EngineError(f"The engine stopped: {self._failure}.", remedy="make a new AsyncLLM")
            raise UsageError("The model is shut down.", remedy="make a new AsyncLLM")
        if key in self._streams:
            raise UsageError(f"Request {submission.request_id!r} is alive already.", remedy="use another request_id")
        exclusive = submission.tenant, submission.exclusive_id
        if submission.exclusive_id and exclusive in self._exclusive:
            raise UsageError(f"A request {submission.exclusive_id!r} is alive already.", remedy="use another id")
        more: dict[str, Any] = {"priority": submission.priority, "tenant": submission.tenant}
        more |= {"constraint": constraint, "arrived": arrived}
        request = self.llm.add(submission.prompt, submission.params, submission.index, **more)
        self._streams[key] = self._by_request[request] = _Stream(request, submission, sink)
        if submission.exclusive_id:
            self._exclusive.add(exclusive)
        if aborted:
            self._abort(key)

    def _abort(self, key: _Key) -> None:
        """End a request by its sink and id, now or as soon as its constraint is compiled."""
        with self._lock:
            if key in self._compiling:
                self._compiling[key] = True
        stream = self._streams.get(key)
        if stream is not None:
            self._end(stream, "abort")

    def _end(self, stream: _Stream, reason: FinishReason, error: str = "") -> None:
        """End a request in the engine with a reason and an error text, and deliver its stream's last piece."""
        self.llm.engine.end(stream.request, reason, error)
        try:
            piece = stream.next_piece()
        except Exception as failure:
            piece = self._fail_stream(stream, f"{error} {type(failure).__name__}: {failure}".strip())
        self._forget(stream)
        if piece is not None:
            self._deliver(stream.sink, [(stream.submission.request_id, piece)])

    def _fail_stream(self, stream: _Stream, message: str) -> Delta:
        """End a stream that lost a piece; returns its last piece, an error even if all its tokens were generated."""
        self.llm.engine.end(stream.request, "error", message)
        self._forget(stream)
        return Delta("", [], "error", None, message)

    def _deliver(self, sink: Sink, pieces: list[tuple[RequestId, Delta]]) -> None:
        """Deliver pieces to a sink. If that fails they are lost: their requests end with "error", and one more delivery
        says so.
        """
        try:
            sink.deliver(pieces)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            for request_id, _ in pieces:
                stream = self._streams.get((sink, request_id))
                if stream is not None:
                    self._fail_stream(stream, message)
            sink.deliver([(request_id, Delta("", [], "error", None, message)) for request_id, _ in pieces])

    def _step(self) -> None:
        """Run one step of the engine, and deliver all new pieces of each caller at once."""
        pieces: dict[Sink, list[tuple[RequestId, Delta]]] = {}
        for request in self.llm.engine.step():
            stream = self._by_request.get(request)
            if stream is None:
                continue
            try:
                piece = stream.next_piece()
            except Exception as error:
                piece = self._fail_stream(stream, f"{type(error).__name__}: {error}")
            if piece is not None:
                if piece.finish_reason is not None:
                    self._forget(stream)
                pieces.setdefault(stream.sink, []).append((stream.submission.request_id, piece))
        for sink, found in pieces.items():
            self._deliver(sink, found)

    def _forget(self, stream: _Stream) -> None:
        """Drop a stream that has ended from all indexes."""
        self._streams.pop((stream.sink, stream.submission.request_id), None)
        self._by_request.pop(stream.request, None)
        self._exclusive.discard((stream.submission.tenant, stream.submission.exclusive_id))

    def _next_work(self) -> Callable[[], None] | None:
        """Wait for the next work of the queue; None ends the thread. Calls `on_idle` once if none comes for `IDLE_S`
        seconds.
        """
        steps = self.llm.engine.metrics.counters["steps_total"]
        if self._on_idle is not None and steps != self._steps_when_idle:
            try:
                return self._inbox.get(timeout=IDLE_S)
            except queue.Empty:
                self._steps_when_idle = steps
                self._on_idle()
        return self._inbox.get()

    def _loop(self) -> None:
        """The engine's thread: run queued work and steps until `close`, or until a step fails; then end all streams."""
        engine = self.llm.engine
        try:
            while True:
                while not engine.busy or not self._inbox.empty():
                    work = self._next_work()
                    self._last_active = time.monotonic()
                    if work is None:
                        return
                    work()
                self._step()
                self._last_active = time.monotonic()
        except BaseException as error:
            self._failure = error
        finally:
            self._ended.set()
            reason: FinishReason = "abort" if self._failure is None else "error"
            message = "" if self._failure is None else f"the engine stopped: {self._failure}"
            for stream in list(self._streams.values()):
                with contextlib.suppress(Exception):  # a failing sink must not keep the others from their last piece
                    self._end(stream, reason, message)
            self._run_remaining_work()

    def _run_remaining_work(self) -> None:
        """Run what still waits in the queue; `_add` rejects requests once the engine has ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._inbox.get_nowait()
                if work is not None:
                    work()


def model_info(llm: LLM) -> ModelInfo:
    """The record of public facts about a loaded model, for callers in other threads and processes."""
    runner, engine = llm.runner, llm.engine
    architectures = llm.files.config.get("architectures") or [""]
    return ModelInfo(
        name=llm.files.name,
        folder=str(llm.files.folder) if llm.files.folder is not None else None,
        architecture=str(architectures[0]),
        device=runner.backend.name,
        device_name=runner.state.name if runner.state is not None else "",
        dtype=str(runner.dtype).removeprefix("torch."),
        kv_cache_dtype=runner.options.kv_cache_dtype,
        vocab=engine.vocab,
        width=runner.model.embed.weight.shape[1],
        max_model_len=runner.max_model_len,
        max_num_seqs=engine.scheduler.limits.max_num_seqs,
        kv_blocks=engine.pools.total,
        block_tokens=engine.cache.block_tokens,
        end_ids=tuple(sorted(llm.end_ids())),
        speculative=engine.speculator.config.method if engine.speculator is not None else "",
        model_type=str(llm.files.config.get("model_type") or ""),
        reply_forms=tuple(form for form in host().reply_forms() if form not in FORMS),
    )
