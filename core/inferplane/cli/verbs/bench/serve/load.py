"""Runs one level of a load: sends requests at a concurrency or a rate, and records what becomes of each."""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from inferplane.cli.verbs.bench.serve.arrivals import Process, Rate, due_times
from inferplane.cli.verbs.bench.serve.datasets import Dataset
from inferplane.cli.verbs.bench.serve.dialects import READERS, BodyOptions, Messages, make_body
from inferplane.cli.verbs.bench.serve.records import (
    CONNECTION,
    INTERRUPTED,
    LoadConversation,
    LoadRequest,
    RequestRecord,
)
from inferplane.cli.verbs.bench.serve.senders import Sender, SendError

PAUSE_S = 0.1
"""Of a place whose connection failed: a server that has ended would otherwise be tried thousands of times a second."""
CountTokens = Callable[[str], int]
OnDone = Callable[[], None]


@dataclass(frozen=True)
class LevelPlan:
    """How much is sent, and when.

    Args:
        concurrency: most requests at a time; None: no limit.
        rate: conversations a second; None: one begins when another has ended.
        process: of arrivals, with a rate.
        max_requests: requests to send; None: until `duration_s`.
        duration_s: seconds after which none is sent; those that run go on to their end. None: no limit.
        seed: of arrivals.
    """

    concurrency: int | None
    rate: Rate | None
    process: Process
    max_requests: int | None
    duration_s: float | None
    seed: int = 0

    @property
    def label(self) -> str:
        """A short name for tables of levels: "8", "2.5/s"."""
        return f"{self.concurrency}" if self.rate is None else f"{self.rate}/s"

    def describe(self) -> str:
        """Words for the level: "8 at a time", "rate 2.5"."""
        if self.rate is None:
            return f"{self.concurrency} at a time"
        limit = "" if self.concurrency is None else f", at most {self.concurrency}"
        return f"rate {self.rate}{limit}"


@dataclass
class LevelResult:
    """What a level has recorded.

    Args:
        plan: of the level.
        records: one for each request that was sent, in order of sending.
        not_sent: requests of conversations that ended early, since one before them failed.
        duration_s: from the beginning to the end of the last request.
        cpu_s: seconds of a processor that the client took meanwhile.
        interrupted: the user ended it.
        resent: requests that were sent again on another connection.
    """

    plan: LevelPlan
    records: list[RequestRecord] = field(default_factory=list)
    not_sent: int = 0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    interrupted: bool = False
    resent: int = 0


class Load:
    """Sends requests to one server.

    Args:
        sender: the way to it.
        endpoint: one of `dialects.ENDPOINTS`.
        options: of every body.
        limit_s: seconds that a request may take.
        count_tokens: counts a text's tokens where the server does not; None: events with text are counted.
        on_done: called when a request has ended or failed.
    """

    def __init__(
        self,
        sender: Sender,
        endpoint: str,
        options: BodyOptions,
        limit_s: float,
        count_tokens: CountTokens | None,
        on_done: OnDone = lambda: None,
    ) -> None:
        self.sender, self.options, self.on_done = sender, options, on_done
        self._endpoint, self._limit_s, self._count_tokens = endpoint, limit_s, count_tokens
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_stopped = False

    def stop(self) -> None:
        """Send nothing more, and end the requests that run."""
        self.is_stopped = True
        for task in self._tasks:
            task.cancel()

    async def run(self, plan: LevelPlan, dataset: Dataset) -> LevelResult:
        """Run a level to its end, or until `stop`."""
        level = _Level(self, plan, dataset)
        gc.collect()
        gc.freeze()  # so that no collection in the middle of a level looks at what was there before
        cpu_s, resent = time.process_time(), self.sender.resent
        level.begun = time.perf_counter()
        try:
            await (level.run_concurrently() if plan.rate is None else level.run_at_rate(plan.rate))
        finally:
            gc.unfreeze()
        result = level.result
        result.cpu_s = time.process_time() - cpu_s
        result.duration_s = max((r.finished_s for r in result.records), default=level.now())
        result.interrupted = self.is_stopped
        result.resent = self.sender.resent - resent
        return result

    def start(self, work: Callable[[], object], started: asyncio.Task[Any]) -> None:
        """Keep a task until it is done, and then call `work`."""
        self._tasks.add(started)

        def finish(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            work()

        started.add_done_callback(finish)

    async def send(self, request: LoadRequest, messages: Messages, record: RequestRecord, begun: float) -> None:
        """Send a request and fill its record; failures are recorded, not raised.

        Args:
            request: what is sent.
            messages: the whole conversation; empty for a prompt.
            record: of it.
            begun: when the run began, by the performance counter.
        """
        body = make_body(self._endpoint, self.options, request, messages)
        reader = READERS[self._endpoint]()
        record.sent_s = time.perf_counter() - begun
        try:
            await self.sender.send(body, reader, self._limit_s)
        except SendError as error:
            record.fail(error.kind, error.words)
        except asyncio.CancelledError:
            record.fail(INTERRUPTED, "the user interrupted the run")
        record.finished_s = time.perf_counter() - begun
        record.arrivals = array("d", (at - begun for at in reader.arrivals))  # a long run has millions
        record.finish_reason, record.text = reader.finish_reason, "".join(reader.parts)
        record.prompt_tokens, record.has_wrong_usage = reader.prompt_tokens or 0, reader.has_wrong_usage
        if reader.output_tokens is not None:
            record.output_tokens, record.counted_by = reader.output_tokens, "usage"
        elif self._count_tokens is not None:
            tokens = self._count_tokens(record.text) if record.text else 0
            record.output_tokens, record.counted_by = tokens, "tokenizer"
        else:
            record.output_tokens, record.counted_by = len(record.arrivals), "chunks"
        self.on_done()


class _Level:
    """The state of one level while it runs."""

    def __init__(self, load: Load, plan: LevelPlan, dataset: Dataset) -> None:
        self._load, self._plan, self._dataset = load, plan, dataset
        self.result = LevelResult(plan)
        self.begun = 0.0
        self._planned = 0

    def now(self) -> float:
        return time.perf_counter() - self.begun

    def _next(self) -> LoadConversation | None:
        """The next conversation, or the part of it that is still due; None if the level sends no more."""
        plan = self._plan
        left = None if plan.max_requests is None else plan.max_requests - self._planned
        if self._load.is_stopped or left == 0 or self._is_over():
            return None
        requests = self._dataset.take().requests[:left]
        self._planned += len(requests)
        return LoadConversation(requests)

    def _is_over(self) -> bool:
        return self._plan.duration_s is not None and self.now() >= self._plan.duration_s

    async def run_concurrently(self) -> None:
        """Play conversations one after the other in each of `concurrency` places."""
        assert self._plan.concurrency is not None
        tasks = [asyncio.create_task(self._play_all()) for _ in range(self._plan.concurrency)]
        await self._wait(tasks)

    async def _play_all(self) -> None:
        while (conversation := self._next()) is not None:
            if await self._play(conversation, None) == CONNECTION:
                with suppress(asyncio.CancelledError):  # `stop` ends the loop
                    await asyncio.sleep(PAUSE_S)

    async def run_at_rate(self, rate: Rate) -> None:
        """Begin each conversation when it is due, also if others have not ended."""
        plan = self._plan
        length_s = plan.duration_s if plan.duration_s is not None else rate.length_of(plan.max_requests or 0)
        due = due_times(rate, plan.process, length_s, plan.seed)
        places = None if plan.concurrency is None else asyncio.Semaphore(plan.concurrency)
        sending = asyncio.create_task(self._begin_when_due(due, places))
        await self._wait([sending])

    async def _begin_when_due(self, due: Iterator[float], places: asyncio.Semaphore | None) -> None:
        running: set[asyncio.Task[str]] = set()
        try:
            for due_s in due:
                if self._plan.duration_s is not None and due_s >= self._plan.duration_s:
                    break
                if (wait_s := due_s - self.now()) > 0:
                    await asyncio.sleep(wait_s)
                if places is not None:
                    await places.acquire()
                conversation = self._next()
                if conversation is None:
                    break
                task = asyncio.create_task(self._play(conversation, due_s))
                running.add(task)
                self._load.start(places.release if places is not None else lambda: None, task)
                task.add_done_callback(running.discard)
        except asyncio.CancelledError:
            pass  # `stop` has ended the requests too
        while running:
            with suppress(asyncio.CancelledError):
                await asyncio.wait(set(running))

    async def _wait(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            self._load.start(lambda: None, task)
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Exception):
                raise found

    async def _play(self, conversation: LoadConversation, due_s: float | None) -> str:
        """Send the requests of a conversation; the kind of failure that ended it, or ""."""
        messages: list[object] = []
        for number, request in enumerate(conversation.requests):
            if number and request.think_s:
                try:
                    await asyncio.sleep(request.think_s)
                except asyncio.CancelledError:
                    self.result.not_sent += len(conversation.requests) - number
                    return INTERRUPTED
            if number and (self._load.is_stopped or self._is_over()):
                self.result.not_sent += len(conversation.requests) - number
                return ""
            messages.extend(request.messages)
            now = self.now()
            record = RequestRecord(request.output_tokens, due_s if due_s is not None and not number else now, now)
            self.result.records.append(record)
            await self._load.send(request, messages, record, self.begun)  # type: ignore[arg-type]
            if record.failure:
                self.result.not_sent += len(conversation.requests) - number - 1
                return record.failure
            if number + 1 < len(conversation.requests):
                messages.append({"role": "assistant", "content": record.text})
            else:
                record.text = ""  # a long run would hold every answer
        return ""
