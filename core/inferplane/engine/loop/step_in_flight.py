"""A step that was launched and is not over for the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from inferplane.engine.loop.choose_later import LaterChoice, LaterTokens
from inferplane.engine.loop.choose_tokens import ChosenTokens
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.schedule.in_flight import Held
from inferplane.engine.schedule.insertion import StepWork
from inferplane.engine.schedule.scheduler import ScheduledChunk
from inferplane.engine.speculate import VerifiedChunk
from inferplane.types import Backend


@dataclass(eq=False)
class StepInFlight:
    """A step that was launched, and is not over for the host.

    Args:
        chunks: its sequences.
        firsts: for each, its number of tokens in the cache before the step.
        preemptions: for each, how often it was preempted before; a later preemption makes its result void.
        choice: what its tokens are chosen from.
        hidden: `[T, D]`, its hidden states.
        held: what is given back meanwhile.
        work: what it computes.
        launched: when, in seconds of the monotonic clock.
        later: its tokens on the device; None: they are chosen when the step before is over.
        read: waits for the host's copies of them.
        chosen: its tokens, once the host has read them.
        committed: how many of its sequences have them, or have ended meanwhile; `row`, the first row of the next one.
        verified: what those did that have them.
    """

    chunks: list[ScheduledChunk]
    firsts: list[int]
    preemptions: list[int]
    choice: LaterChoice
    hidden: torch.Tensor
    held: Held
    work: StepWork
    launched: float
    later: LaterTokens | None = None
    read: Callable[[], list[torch.Tensor]] | None = None
    chosen: list[ChosenTokens] | None = None
    committed: int = 0
    row: int = 0
    verified: list[VerifiedChunk] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = {id(request): place for place, request in enumerate(self.choice.requests)}

    def is_current(self, number: int) -> bool:
        """Whether a sequence still goes on from this step: it has not ended, nor was it preempted."""
        request = self.chunks[number].request
        return request.finish_reason is None and request.preemptions == self.preemptions[number]

    def choose(self, sampler: Sampler, backend: Backend) -> None:
        """Choose its tokens, on the device, and begin to copy them; nothing if that was done."""
        if self.read is not None:
            return
        current = {id(c.request) for number, c in enumerate(self.chunks) if self.is_current(number)}
        with torch.inference_mode():
            later = self.choice.choose(sampler, lambda request: id(request) in current)
            read = backend.start_read(later.list_tensors())
        self.later, self.read = later, read

    def wait(self) -> list[ChosenTokens]:
        """Wait for its tokens, if they were chosen; raises as `LaterTokens.on_host`, and what the device reports."""
        if self.chosen is None and self.later is not None and self.read is not None:
            self.chosen = self.later.on_host(self.read())
        return self.chosen or []
