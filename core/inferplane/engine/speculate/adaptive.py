"""How many drafts to request for a sequence: by how many of its last drafts were accepted, and by what pays."""

from __future__ import annotations

from inferplane.engine.request.state import Request
from inferplane.engine.speculate.control import DraftControl


class AdaptiveLength:
    """How many drafts to request for each sequence: two more after all were accepted, one fewer after a rejection, and
    no more than pay (`DraftControl`).

    Args:
        maximum: number for a new sequence, and the most.
        adaptive: adapt the number; False: always `maximum`.
        control: limits the number so that drafting pays; None: it is not limited.
    """

    def __init__(self, maximum: int, adaptive: bool, control: DraftControl | None = None) -> None:
        self.maximum, self.adaptive = maximum, adaptive
        self.control = control
        self._length: dict[int | str, int] = {}

    def length(self, request: Request) -> int:
        """The number of drafts to request now for a sequence."""
        return self._limit(request, self._length.get(request.request_id, self.maximum))

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Adapt the number for a sequence, after `num_accepted` of its `num_drafts` drafts were accepted in a step."""
        if self.adaptive and num_drafts:
            self._length[request.request_id] = self._next(request, num_drafts, num_accepted)
        if self.control is not None and num_drafts:
            self.control.observe(request, num_drafts, num_accepted)

    @property
    def is_paused(self) -> bool:
        """Whether no drafts are made now, but for trials."""
        return self.control is not None and self.control.is_paused

    def observe_step(self, sequences: int, tokens: int, seconds: float, drafting_seconds: float = 0.0) -> None:
        """See `DraftControl.observe_step`."""
        if self.control is not None:
            self.control.observe_step(sequences, tokens, seconds, drafting_seconds)

    def length_after(self, request: Request, num_drafts: int, num_accepted: int) -> int:
        """The number of drafts to request if `num_accepted` of `num_drafts` are accepted; nothing changes."""
        return self._limit(request, self._next(request, num_drafts, num_accepted))

    def _next(self, request: Request, num_drafts: int, num_accepted: int) -> int:
        now = self._length.get(request.request_id, self.maximum)
        if not self.adaptive or not num_drafts:
            return now
        return min(self.maximum, now + 2) if num_accepted == num_drafts else max(1, now - 1)

    def _limit(self, request: Request, count: int) -> int:
        return count if self.control is None else min(count, self.control.limit(request))

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that has ended."""
        self._length.pop(request.request_id, None)
        if self.control is not None:
            self.control.forget(request)
