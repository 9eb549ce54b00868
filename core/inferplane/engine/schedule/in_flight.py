"""Steps in flight: what sequences give back meanwhile is available again when the step that may use it is over.

A device runs its steps in the order in which they were launched. A sequence that ends, is aborted or preempted while a
step is in flight has rows in that step, which write to its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inferplane.engine.request.state import Request
from inferplane.engine.schedule.tables import GivenBack, SequenceTables
from inferplane.kvcache import StatePool
from inferplane.types.state import StateSlots


@dataclass(eq=False)
class Held:
    """What sequences gave back while a step was the newest one in flight: blocks, and the slots of states."""

    blocks: GivenBack = field(default_factory=list)
    states: list[StateSlots] = field(default_factory=list)


class StepsInFlight:
    """Holds back what steps in flight may use.

    Args:
        tables: gives blocks back.
        states: the slots of recurrent layers' states; None: no layer keeps any.

    Attributes: `steps`, what is held for each step, the oldest step first.
    """

    def __init__(self, tables: SequenceTables, states: StatePool | None) -> None:
        self._tables, self._states = tables, states
        self.steps: list[Held] = []

    def begin(self) -> Held:
        """A step is in flight from now on: what sequences give back waits for its end. Returns what `finish` takes."""
        held = Held()
        self.steps.append(held)
        self._tables.held = held.blocks
        return held

    def finish(self, held: Held) -> None:
        """A step is over: what sequences gave back while it was the newest one in flight is available again. Steps end
        in their order; a second call does nothing.
        """
        if held not in self.steps:
            return
        self.steps.remove(held)
        self._tables.held = self.steps[-1].blocks if self.steps else None
        for allocator, blocks in held.blocks:
            allocator.release(blocks)
        for slots in held.states:
            assert self._states is not None
            self._states.release(slots)

    def release_states(self, slots: StateSlots) -> None:
        """Take back the state slots of a sequence, now or after the newest step in flight."""
        assert self._states is not None
        if self.steps:
            self.steps[-1].states.append(slots)
        else:
            self._states.release(slots)

    def advance(self, request: Request, count: int) -> None:
        """Record that a step is in flight which computes a sequence's next `count` known tokens, without drafts, and
        chooses its next token if they are all: what the device runs later finds their entries.
        """
        samples = request.computed + count == request.tokens
        request.computed += count
        request.pending += samples
        request.drafts = []  # they were guesses for the token that this step chooses
        if self._states is not None and request.state is not None:
            request.state = self._states.advance(request.state)
