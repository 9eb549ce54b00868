"""Asynchronous scheduling: the next step is scheduled and launched while the one before runs on the device.

At most two steps are in flight. The second takes the tokens that the first chooses from the device, so it is launched
before the host knows them. What follows from a token is found one step late: a sequence that ends in the first step has
a row in the second one, whose token is dropped. Lengths are known ahead: no sequence has a row behind its last token.

Some steps need the host between two steps; they wait, and `Metrics.waits` counts why (`REASONS`). A step that fails
while another is in flight takes both back: their sequences are preempted, and those of the step that failed run next
without anything in flight, where a failure ends only the sequence that causes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from inferplane.engine.loop.choose_later import LaterTokens, choose_later
from inferplane.engine.loop.choose_tokens import ChosenTokens
from inferplane.engine.loop.metrics import Metrics
from inferplane.engine.request.results import FinishReason
from inferplane.engine.request.state import Request
from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.sampling.batch_rows import to_device
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.schedule.in_flight import Held
from inferplane.engine.schedule.insertion import StepWork
from inferplane.engine.schedule.scheduler import ScheduledChunk, Scheduler, count_work
from inferplane.engine.speculate import Speculator
from inferplane.errors import in_words, warn
from inferplane.types import Backend, Batch, KVCache, ModelOutput
from inferplane.types.batch import make_batch

REASONS = {
    "speculation": "drafts are verified on the host's word",
    "ranks": "the other ranks get each step's tokens from the host",
    "pooling": "an embedding is pooled on the host",
    "states": "the states at a block's end are to be found by their prefix",
    "failure": "a step failed, and its sequences run again",
    "blocks": "too few blocks are free, so a sequence may have to be preempted",
    "penalties": "penalties count the newest token",
    "constraint": "a constraint allows tokens by the newest one",
}
"""Why a step waits for the one before, by the name under which it is counted."""
ALONE = ("speculation", "ranks", "pooling", "states", "failure")
"""Reasons for which the step itself is waited for before anything else is scheduled."""


def why_not_overlapped(backend: Backend, setting: str) -> str:
    """In words, why no step is prepared while another one runs; empty if steps are.

    Args:
        backend: of the device.
        setting: `async_scheduling`: "auto", "on" or "off".
    """
    if setting == "off":
        return "async_scheduling='off'"
    if setting == "auto" and not backend.asynchronous:
        return f"device {backend.name!r} runs each step while the host waits"
    try:
        backend.start_read([torch.zeros(1, dtype=torch.int64, device=backend.torch_device_indexed)])()
    except Exception as error:
        reason = f"device {backend.name!r} cannot be read behind a step: {in_words(error)}"
        warn(f"Every step is waited for before the next one is scheduled: {reason}.")
        return reason
    return ""


class Loop(Protocol):
    """What is used of the engine here; its members are described there."""

    runner: Runner
    scheduler: Scheduler
    sampler: Sampler
    cache: KVCache
    metrics: Metrics
    device: str
    speculator: Speculator | None
    why_not_overlapped: str
    work: tuple[StepWork, int]

    def schedule(self) -> list[ScheduledChunk]:
        """The chunks of the next step."""

    def run_chunks(self, chunks: list[ScheduledChunk]) -> list[Request]:
        """Run chunks as one step, or each alone if that fails."""

    def run_each_alone(self, chunks: list[ScheduledChunk]) -> list[Request]:
        """Run each chunk as a step."""

    def end(self, request: Request, reason: FinishReason, error: str = "") -> None:
        """End a request with a reason."""

    def fail(self, request: Request, error: Exception) -> list[Request]:
        """End a request whose step failed though it ran alone."""

    def commit(self, chunk: ScheduledChunk, chosen: ChosenTokens, row: int, sent: int | None = None) -> Any:
        """Accept a sequence's new tokens."""


def describe_overlap(loop: Loop) -> dict[str, Any]:
    """The `async_scheduling` of `explain`: why it is `off`, in words ("": it is not), how many steps were launched
    while another one ran, and how many waited.
    """
    metrics = loop.metrics
    waits = [{"reason": why, "words": REASONS[why], "steps": n} for why, n in sorted(metrics.waits.items())]
    overlapped = metrics.counters["overlapped_steps_total"]
    return {"off": loop.why_not_overlapped, "overlapped_steps": overlapped, "waits": waits}


def describe_overlap_in_words(loop: Loop) -> str:
    """`describe_overlap` as a line of text."""
    data = describe_overlap(loop)
    if data["off"]:
        return f"asynchronous scheduling: off, {data['off']}"
    waits = "".join(f"; {w['steps']} waited: {w['words']}" for w in data["waits"])
    return f"asynchronous scheduling: on, {data['overlapped_steps']} steps launched while another one ran{waits}"


@dataclass(eq=False)
class StepInFlight:
    """A step that was launched, and is not over for the host.

    Args:
        chunks: its sequences.
        firsts: for each, its number of tokens in the cache before the step.
        preemptions: for each, how often it was preempted before; a later preemption makes its result void.
        later: its tokens on the device.
        read: waits for the host's copies of them.
        held: what is given back meanwhile.
        work: what it computes.
        chosen: its tokens, once the host has read them.
        committed: how many of its sequences have them.
    """

    chunks: list[ScheduledChunk]
    firsts: list[int]
    preemptions: list[int]
    later: LaterTokens
    read: Callable[[], list[torch.Tensor]]
    held: Held
    work: StepWork
    chosen: list[ChosenTokens] | None = None
    committed: int = 0
    places: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sampled = (c for c, samples in zip(self.chunks, self.later.samples) if samples)
        self.places = {id(c.request): place for place, c in enumerate(sampled)}

    def is_current(self, number: int) -> bool:
        """Whether a sequence still goes on from this step: it has not ended, nor was it preempted."""
        request = self.chunks[number].request
        return request.finish_reason is None and request.preemptions == self.preemptions[number]


class Overlap:
    """Runs an engine's steps with up to two of them in flight.

    Args:
        loop: the engine.

    Attributes: `steps`, those in flight, the oldest first.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.steps: list[StepInFlight] = []
        self._failed: list[Request] = []

    def step(self) -> list[Request] | None:
        """Launch a step, and the next one if it need not wait; then wait for the older one. Returns the requests that
        got tokens or ended in it; None if nothing could run.
        """
        if not self.steps:
            chunks = self.loop.schedule()
            if not chunks:
                return None
            if why := self._why_alone(chunks):
                return self._run_alone(chunks, why)
            try:
                self._launch(chunks)
            except Exception as error:
                return self.loop.fail(chunks[0].request, error) if len(chunks) == 1 else self._run_again(chunks)
        if len(self.steps) == 1:
            self._launch_next()
        return self._collect()

    def drop(self) -> None:
        """Wait for the steps in flight, whose sequences have all ended, and drop their results."""
        for step in self.steps:
            with contextlib.suppress(Exception):  # nothing of it is used
                step.read()
        self._forget()

    # -- launching

    def _launch(self, chunks: list[ScheduledChunk]) -> None:
        """Launch a step behind those in flight. Nothing has changed if that raises, unless it is an interrupt: then
        sequences may have been preempted.
        """
        loop, scheduler, backend = self.loop, self.loop.scheduler, self.loop.runner.backend
        queries = scheduler.queries(chunks)
        batch = make_batch(queries, block_tokens=loop.cache.block_tokens, device=loop.device, non_blocking=True)
        with torch.inference_mode():
            if self.steps:
                self._fill_ids(batch, chunks)
            output = loop.runner.run(batch)
            argmax = output.argmax if isinstance(output, ModelOutput) else None
            later = choose_later(chunks, queries, output[0], loop.sampler, argmax)
            read = backend.start_read(later.list_tensors())
        work = count_work(chunks)
        firsts, preemptions = [c.request.computed for c in chunks], [c.request.preemptions for c in chunks]
        loop.metrics.counters["forward_rows_total"] += sum(c.rows for c in chunks)
        try:
            held = scheduler.in_flight.begin()
            self.steps.append(StepInFlight(chunks, firsts, preemptions, later, read, held, work))
            for c in chunks:
                scheduler.in_flight.advance(c.request, c.count)
        except BaseException:
            self._take_back()
            raise

    def _fill_ids(self, batch: Batch, chunks: Sequence[ScheduledChunk]) -> None:
        """Put the tokens that the step in flight chooses into a batch, in place."""
        before, row = self.steps[-1], 0
        rows, places = [], []
        for c in chunks:
            row += c.rows
            if c.request.pending:
                rows.append(row - 1)
                places.append(before.places[id(c.request)])
        tokens = before.later.tokens
        if tokens is None or not rows:
            return
        if rows == places == list(range(tokens.shape[0])):
            batch.ids[: len(rows)].copy_(tokens)
            return
        at, source = to_device((np.array(rows, np.int64), np.array(places, np.int64)), batch.ids.device)
        batch.ids.index_copy_(0, at, tokens.index_select(0, source))

    def _launch_next(self) -> None:
        """Launch the step behind the one in flight, unless it has to wait."""
        chunks = self.loop.schedule()
        if why := self._why_not_yet(chunks):
            self.loop.metrics.waits[why] += 1
            return
        if not chunks or self._why_alone(chunks):
            return
        try:
            self._launch(chunks)
        except Exception:  # it is scheduled again when nothing is in flight, and if it fails then, too, ends a request
            self.loop.metrics.waits["failure"] += 1
            return
        self.loop.metrics.counters["overlapped_steps_total"] += 1

    def _why_alone(self, chunks: Sequence[ScheduledChunk]) -> str:
        """The reason in `ALONE` why a step has to be waited for before another one is scheduled; empty: none."""
        if self.loop.speculator is not None:
            return "speculation"
        if self.loop.runner.ranks is not None:
            return "ranks"
        if any(c.request.params.pooling is not None for c in chunks):
            return "pooling"
        if any(c.request in self._failed for c in chunks):
            return "failure"
        return "states" if any(map(self._publishes_state, chunks)) else ""

    def _publishes_state(self, chunk: ScheduledChunk) -> bool:
        """Whether the states after a chunk are to be found by its prefix once the step is over."""
        scheduler = self.loop.scheduler
        at_block_end = (chunk.request.computed + chunk.count) % scheduler.block_tokens == 0
        return scheduler.states is not None and scheduler.root is not None and at_block_end

    def _why_not_yet(self, chunks: Sequence[ScheduledChunk]) -> str:
        """The reason why a step has to wait for the one in flight, though it may be in flight itself; empty: none."""
        if self.loop.scheduler.too_few_blocks:
            return "blocks"
        requests = [c.request for c in chunks if c.request.pending and c.request.needs_newest_token]
        if not requests:
            return ""
        return "penalties" if any(r.history is not None for r in requests) else "constraint"

    # -- a step's end

    def _run_alone(self, chunks: list[ScheduledChunk], why: str) -> list[Request]:
        """Run a step and wait for it, with nothing in flight."""
        self.loop.metrics.waits[why] += 1
        sampled, self.loop.work = [c.request for c in chunks if c.samples_next], (count_work(chunks), len(chunks))
        touched = self.loop.run_chunks(chunks)
        self._failed = [r for r in self._failed if r.finish_reason is None and r not in sampled]
        return touched

    def _run_again(self, chunks: list[ScheduledChunk]) -> list[Request]:
        """Run each sequence of a step alone that failed when it was launched."""
        self.loop.metrics.waits["failure"] += 1
        return self.loop.run_each_alone(chunks)

    def _collect(self) -> list[Request]:
        """Wait for the oldest step, and give its sequences their tokens; returns those that got some or ended."""
        step = self.steps[0]
        if step.chosen is None:
            try:
                step.chosen = step.later.on_host(step.read())
            except Exception as error:
                return self._fail(step, error)
        touched, self.loop.work = [], (step.work, len(step.chunks))
        while step.committed < len(step.chunks):
            number = step.committed
            touched += self._commit(step, number, step.chosen[number])
            step.committed += 1
        del self.steps[0]
        self.loop.scheduler.in_flight.finish(step.held)
        return touched

    def _commit(self, step: StepInFlight, number: int, chosen: ChosenTokens) -> list[Request]:
        """Give one sequence its tokens, unless it ended or was preempted meanwhile: then they are dropped."""
        if not step.is_current(number):
            return []
        chunk, first = step.chunks[number], step.firsts[number]
        try:
            self.loop.commit(chunk, chosen, 0, first)
        except BaseException:  # an interrupt
            self.loop.end(chunk.request, "abort", "interrupted")
            raise
        self.loop.scheduler.release_out_of_window(chunk.request, first + chunk.count)
        return [chunk.request] if chosen.tokens else []

    def _fail(self, step: StepInFlight, error: Exception) -> list[Request]:
        """A step in flight failed: take back what is in flight. Its sequences run again, with nothing in flight."""
        self.loop.metrics.waits["failure"] += 1
        alive = [c.request for i, c in enumerate(step.chunks) if step.is_current(i)]
        touched = []
        try:
            if len(step.chunks) == len(alive) == 1:
                touched = self.loop.fail(alive[0], error)
            self._failed += [r for r in alive if r.finish_reason is None and r not in self._failed]
        finally:
            self._take_back()
        return touched

    def _take_back(self) -> None:
        """Wait for the steps in flight, and preempt their sequences, which begin anew."""
        steps = list(self.steps)
        with contextlib.suppress(Exception):  # a lost device is found when the sequences run again
            self.loop.runner.backend.synchronize()
        self._forget()
        for step in steps:
            for number, c in enumerate(step.chunks):
                if step.is_current(number) and c.request in self.loop.scheduler.running:
                    self.loop.scheduler.preempt(c.request)

    def _forget(self) -> None:
        """No step is in flight any more."""
        while self.steps:
            self.loop.scheduler.in_flight.finish(self.steps.pop(0).held)
