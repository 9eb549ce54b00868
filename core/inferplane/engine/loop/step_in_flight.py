"""A step that was launched and is not over for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from inferplane.engine.loop.choose_later import LaterChoice, LaterTokens
from inferplane.engine.loop.choose_tokens import ChosenTokens
from inferplane.engine.request.state import Request
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.schedule.in_flight import Held
from inferplane.engine.schedule.insertion import StepWork
from inferplane.engine.schedule.scheduler import ScheduledChunk
from inferplane.engine.speculate import VerifiedChunk
from inferplane.engine.speculate.captured.drafts_in_flight import DraftedTokens, DraftsInFlight
from inferplane.types import Backend


@dataclass(eq=False)
class StepInFlight:
    """A step that was launched, and is not over for the host.

    Args:
        chunks: its sequences.
        firsts: for each, its number of tokens in the cache before the step.
        preemptions: for each, how often it was preempted before; a later preemption makes its result void.
        work: what it computes.
        launched: when, in seconds of the monotonic clock.
        choice: what its tokens are chosen from; None: they are chosen within the step.
        hidden: `[T, D]`, its hidden states; None: nothing reads them.
        drafted: a captured step that verifies drafts and makes others; None: another step.
        held: what is given back meanwhile.
        later: its tokens on the device; None: they are chosen when the step before is over.
        read: waits for the host's copies of them.
        chosen: its tokens, once the host has read them.
        committed: how many of its sequences have them, or have ended meanwhile; `row`, the first row of the next one.
        verified: what those did that have them, and `drafts`, those for their next step.
    """

    chunks: list[ScheduledChunk]
    firsts: list[int]
    preemptions: list[int]
    work: StepWork
    launched: float
    choice: LaterChoice | None = None
    hidden: torch.Tensor | None = None
    drafted: DraftsInFlight | None = None
    held: Held = field(default_factory=Held)
    later: LaterTokens | None = None
    read: Callable[[], list[torch.Tensor]] | None = None
    chosen: list[ChosenTokens] | None = None
    committed: int = 0
    row: int = 0
    verified: list[VerifiedChunk] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    found: list[DraftedTokens] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        requests: Sequence[Request] = () if self.choice is None else self.choice.requests
        if self.drafted is not None:
            requests = self.drafted.requests
        self.places = {id(request): place for place, request in enumerate(requests)}

    def is_current(self, number: int) -> bool:
        """Whether a sequence still goes on from this step: it has not ended, nor was it preempted."""
        request = self.chunks[number].request
        return request.finish_reason is None and request.preemptions == self.preemptions[number]

    def choose(self, sampler: Sampler, backend: Backend) -> None:
        """Choose its tokens, on the device, and begin to copy them; nothing if that was done."""
        if self.read is not None:
            return
        if self.drafted is not None:
            self.read = backend.start_read([self.drafted.table, self.drafted.rows])
            return
        assert self.choice is not None, "nothing to choose from"
        current = {id(c.request) for number, c in enumerate(self.chunks) if self.is_current(number)}
        with torch.inference_mode():
            later = self.choice.choose(sampler, lambda request: id(request) in current)
            read = backend.start_read(later.list_tensors())
        self.later, self.read = later, read

    def wait(self) -> list[ChosenTokens]:
        """Wait for its tokens, if they were chosen; raises as `LaterTokens.on_host`, and what the device reports."""
        if self.chosen is None and self.drafted is not None and self.read is not None:
            self.found = self.drafted.on_host(self.read())
            self.chosen = [ChosenTokens(each.tokens) for each in self.found]
        if self.chosen is None and self.later is not None and self.read is not None:
            self.chosen = self.later.on_host(self.read())
        return self.chosen or []
