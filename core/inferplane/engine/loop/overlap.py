"""Asynchronous scheduling: the next step is scheduled and launched while the one before runs on the device.

At most two steps are in flight. The second takes the tokens that the first chooses from the device, so it is launched
before the host knows them. What follows from a token is found one step late: a sequence that ends in the first step has
a row in the second one, whose token is dropped. Lengths are known ahead: no sequence has a row behind its last token.

Where the choice of a token depends on the one before, through a constraint or penalties, the model of the second step
is launched all the same, and its tokens are chosen when the host has accepted those of the first (`LaterChoice`).

Some steps need the host between two steps; they wait, and `Metrics.waits` counts why (`why_waited`). A step that fails
while another is in flight takes both back: their sequences are preempted, and those of the step that failed run next
without anything in flight, where a failure ends only the sequence that causes it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from inferplane.engine.loop.choose_later import prepare_choice
from inferplane.engine.loop.choose_tokens import ChosenTokens
from inferplane.engine.loop.metrics import Metrics
from inferplane.engine.loop.step_in_flight import StepInFlight
from inferplane.engine.request.results import FinishReason
from inferplane.engine.request.state import Request
from inferplane.engine.runner.model_runner import Runner, run_behind
from inferplane.engine.sampling.batch_rows import to_device
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.schedule.insertion import StepWork
from inferplane.engine.schedule.scheduler import ScheduledChunk, Scheduler, count_work
from inferplane.engine.speculate import Speculator, VerifiedChunk
from inferplane.types import Batch, KVCache, ModelOutput
from inferplane.types.batch import make_batch

WAITED_S = 1e-4
"""Seconds from which on the host counts as having waited for a step: it was not over before."""


class Loop(Protocol):
    """What is used of the engine here; its members are described there."""

    runner: Runner
    scheduler: Scheduler
    sampler: Sampler
    cache: KVCache
    metrics: Metrics
    device: str
    speculator: Speculator | None
    work: tuple[StepWork, int, float | None] | None

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

    def commit(self, chunk: ScheduledChunk, chosen: ChosenTokens, row: int, sent: int | None = None) -> VerifiedChunk:
        """Accept a sequence's new tokens."""

    def propose(self, verified: list[VerifiedChunk], hidden: torch.Tensor) -> None:
        """Draft for the next step."""


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
        self._awaits_drafts = False
        self._begun = self._left = self._ended = 0.0  # this call, the end of the last one, and of the last step

    def step(self) -> list[Request] | None:
        """Launch a step, and the next one if it need not wait; then wait for the older one. Returns the requests that
        got tokens or ended in it; None if nothing could run.
        """
        self._begun = time.monotonic()
        try:
            if failed := self._choose_oldest():  # an interrupt came in between
                return failed
            if not self.steps:
                chunks = self.loop.schedule()
                if not chunks:
                    return None
                why = self._why_alone(chunks)
                if why not in ("", "speculation"):
                    return self._run_alone(chunks, why)
                try:
                    launched = self._launch_with_drafts(chunks) if why else self._launch(chunks)
                except Exception as error:
                    return self.loop.fail(chunks[0].request, error) if len(chunks) == 1 else self._run_again(chunks)
                if not launched:
                    return self._run_alone(chunks, why)
                if self._awaits_drafts:
                    self.loop.metrics.waits["speculation"] += 1
            if len(self.steps) == 1:
                self._launch_next()
            return self._collect() + self._choose_oldest()
        finally:
            self._left = time.monotonic()

    def drop(self) -> None:
        """Wait for the steps in flight, whose sequences have all ended, and drop their results."""
        with contextlib.suppress(Exception):  # nothing of them is used
            self.loop.runner.backend.synchronize()
        for step in self.steps:
            with contextlib.suppress(Exception):
                step.wait()
        self._forget()

    # -- launching

    def _launch(self, chunks: list[ScheduledChunk]) -> bool:
        """Launch a step behind those in flight; returns True. Nothing has changed if that raises, unless it is an
        interrupt: then sequences may have been preempted.
        """
        loop, scheduler, launched = self.loop, self.loop.scheduler, time.monotonic()
        queries = scheduler.queries(chunks)
        batch = make_batch(queries, block_tokens=loop.cache.block_tokens, device=loop.device, non_blocking=True)
        with torch.inference_mode():
            unknown = self._fill_ids(batch, chunks) if self.steps else []
            output = run_behind(loop.runner, batch, queries, unknown)
            argmax = output.argmax if isinstance(output, ModelOutput) else None
            choice = prepare_choice(chunks, queries, output[0], argmax)
        self._add(self._describe(chunks, launched, choice=choice, hidden=output[1]), not choice.needs_newest)
        return True

    def _launch_with_drafts(self, chunks: list[ScheduledChunk]) -> bool:
        """As `_launch`, for a step that verifies drafts and makes others in one capture; False, and nothing is done, if
        there is none for it.
        """
        speculator, launched = self.loop.speculator, time.monotonic()
        assert speculator is not None, "nothing drafts"
        drafted = speculator.launch(chunks, self.steps[-1].drafted if self.steps else None)
        if drafted is not None:
            self._add(self._describe(chunks, launched, drafted=drafted))
        return drafted is not None

    def _describe(self, chunks: list[ScheduledChunk], launched: float, **parts: Any) -> StepInFlight:
        firsts, preemptions = [c.request.computed for c in chunks], [c.request.preemptions for c in chunks]
        return StepInFlight(chunks, firsts, preemptions, count_work(chunks), launched, **parts)

    def _add(self, step: StepInFlight, chooses: bool = True) -> None:
        """Choose the tokens of a step, unless that has to wait, and count it as in flight."""
        loop, in_flight = self.loop, self.loop.scheduler.in_flight
        if chooses:
            step.choose(loop.sampler, loop.runner.backend)
        loop.metrics.counters["forward_rows_total"] += sum(c.rows for c in step.chunks)
        try:
            step.held = in_flight.begin()
            self.steps.append(step)
            for c in step.chunks:
                in_flight.advance(c.request, c.count)
        except BaseException:
            self._take_back()
            raise

    def _fill_ids(self, batch: Batch, chunks: Sequence[ScheduledChunk]) -> list[int]:
        """Put the tokens that the step in flight chooses into a batch, in place; returns their rows."""
        before, row = self.steps[-1], 0
        rows, places = [], []
        for c in chunks:
            row += c.rows
            if c.request.pending:
                rows.append(row - 1)
                places.append(before.places[id(c.request)])
        tokens = None if before.later is None else before.later.tokens
        if tokens is None or not rows:
            return []
        if rows == places == list(range(tokens.shape[0])):
            batch.ids[: len(rows)].copy_(tokens)
            return rows
        at, source = to_device((np.array(rows, np.int64), np.array(places, np.int64)), batch.ids.device)
        batch.ids.index_copy_(0, at, tokens.index_select(0, source))
        return rows

    def _launch_next(self) -> None:
        """Launch the step behind the one in flight, unless it has to wait."""
        speculator, before = self.loop.speculator, self.steps[-1]
        has_drafts = before.drafted is not None
        self._awaits_drafts = not has_drafts and speculator is not None and speculator.is_awaited(before.chunks)
        if self._awaits_drafts:
            return
        chunks = self.loop.schedule()
        if self.loop.scheduler.too_few_blocks:
            self.loop.metrics.waits["blocks"] += 1
            return
        if not chunks or (not has_drafts and self._why_alone(chunks)):
            return
        try:
            if not has_drafts:
                self._launch(chunks)
            elif not self._follows(chunks, before) or not self._launch_with_drafts(chunks):
                self._awaits_drafts = True
                return
        except Exception:  # it is scheduled again when nothing is in flight, and if it fails then, too, ends a request
            self.loop.metrics.waits["failure"] += 1
            return
        self.loop.metrics.counters["overlapped_steps_total"] += 1

    def _follows(self, chunks: Sequence[ScheduledChunk], before: StepInFlight) -> bool:
        """Whether the inputs of a step follow from the result of the one before, which drafts for it."""
        return all(c.request.pending and c.samples_next and id(c.request) in before.places for c in chunks)

    def _why_alone(self, chunks: Sequence[ScheduledChunk]) -> str:
        """The reason in `why_waited.ALONE` why a step has to be over before another one is scheduled; empty: none."""
        if any(c.request.params.pooling is not None for c in chunks):
            return "pooling"
        if any(c.request in self._failed for c in chunks):
            return "failure"
        if any(map(self._publishes_state, chunks)):
            return "states"
        speculator = self.loop.speculator
        return "speculation" if speculator is not None and speculator.needs_step(chunks) else ""

    def _publishes_state(self, chunk: ScheduledChunk) -> bool:
        """Whether the states after a chunk are to be found by its prefix once the step is over."""
        scheduler = self.loop.scheduler
        at_block_end = (chunk.request.computed + chunk.count) % scheduler.block_tokens == 0
        return scheduler.states is not None and scheduler.root is not None and at_block_end

    # -- a step's end

    def _run_alone(self, chunks: list[ScheduledChunk], why: str) -> list[Request]:
        """Run a step and wait for it, with nothing in flight."""
        self._awaits_drafts = False
        self.loop.metrics.waits[why] += 1
        sampled, self.loop.work = [c.request for c in chunks if c.samples_next], (count_work(chunks), len(chunks), None)
        touched = self.loop.run_chunks(chunks)
        self._failed = [r for r in self._failed if r.finish_reason is None and r not in sampled]
        return touched

    def _run_again(self, chunks: list[ScheduledChunk]) -> list[Request]:
        """Run each sequence of a step alone that failed when it was launched."""
        self.loop.metrics.waits["failure"] += 1
        return self.loop.run_each_alone(chunks)

    def _choose_oldest(self) -> list[Request]:
        """Choose the tokens of the oldest step, unless they are chosen: those of the step before are accepted now.
        Returns requests that ended because that failed.
        """
        if not self.steps or self.steps[0].read is not None:
            return []
        try:
            self.steps[0].choose(self.loop.sampler, self.loop.runner.backend)
        except Exception as error:
            return self._fail(self.steps[0], error)
        return []

    def _collect(self) -> list[Request]:
        """Wait for the oldest step, and give its sequences their tokens; returns those that got some or ended."""
        step, loop = self.steps[0], self.loop
        begun = time.monotonic()
        try:
            chosen = step.wait()
        except Exception as error:
            return self._fail(step, error)
        loop.work = step.work, len(step.chunks), self._count_seconds(step, begun)
        touched = []
        while step.committed < len(step.chunks):
            number = step.committed
            touched += self._commit(step, number, chosen[number])
            step.committed, step.row = number + 1, step.row + step.chunks[number].rows
        del self.steps[0]
        loop.scheduler.in_flight.finish(step.held)
        try:
            self._draft(step)
        finally:
            for done in step.verified:
                loop.scheduler.release_out_of_window(done.request, done.first + done.rows)
        return touched

    def _draft(self, step: StepInFlight) -> None:
        """Draft behind a step that is over, or set the drafts that it made."""
        if step.drafted is None:
            assert step.hidden is not None, "a step without drafts keeps its hidden states"
            self.loop.propose(step.verified, step.hidden)
        elif self.loop.speculator is not None and self.steps:
            self.loop.speculator.observe(step.verified)
        elif self.loop.speculator is not None:
            self.loop.speculator.set_drafts(step.verified, step.drafts)

    def _count_seconds(self, step: StepInFlight, begun: float) -> float:
        """The time of a step that is over now: since the one before was over, or since its launch. `begun`: when the
        host began to wait. What the host did between two calls counts if the step took as long.
        """
        start, now = max(step.launched, self._ended), time.monotonic()
        outside = 0.0 if now - begun >= WAITED_S else max(0.0, self._begun - max(start, self._left))
        self._ended = now
        return now - start - outside

    def _commit(self, step: StepInFlight, number: int, chosen: ChosenTokens) -> list[Request]:
        """Give one sequence its tokens, unless it ended or was preempted meanwhile: then they are dropped."""
        if not step.is_current(number):
            return []
        chunk, first = step.chunks[number], step.firsts[number]
        if step.drafted is not None:  # how many drafts it had, and where it began, was known on the device alone
            found, known = step.found[number], len(chunk.request.prompt) + len(chunk.request.generated)
            chunk, first = replace(chunk, drafts=(0,) * found.num_drafts), known - 1
        try:
            step.verified.append(self.loop.commit(chunk, chosen, step.row, first))
            if step.drafted is not None:
                step.drafts.append(step.found[number].drafts)
        except BaseException:  # an interrupt
            self.loop.end(chunk.request, "abort", "interrupted")
            raise
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
