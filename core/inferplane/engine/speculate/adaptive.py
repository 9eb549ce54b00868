"""How many drafts to request for a sequence, by how many of its last drafts were accepted."""

from __future__ import annotations

from inferplane.engine.request.state import Request


class AdaptiveLength:
    """How many drafts to request for each sequence: two more after all were accepted, one fewer after a rejection.

    Args:
        maximum: number for a new sequence, and the most; the least is 1.
        adaptive: adapt the number; False: always `maximum`.
    """

    def __init__(self, maximum: int, adaptive: bool) -> None:
        self.maximum, self.adaptive = maximum, adaptive
        self._length: dict[int | str, int] = {}

    def length(self, request: Request) -> int:
        """The number of drafts to request now for a sequence; the maximum for one that was never verified."""
        return self._length.get(request.request_id, self.maximum)

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Adapt the number for a sequence, after `num_accepted` of its `num_drafts` drafts were accepted in a step."""
        if self.adaptive and num_drafts:
            self._length[request.request_id] = self.length_after(request, num_drafts, num_accepted)

    def length_after(self, request: Request, num_drafts: int, num_accepted: int) -> int:
        """The number of drafts to request if `num_accepted` of `num_drafts` are accepted; nothing changes."""
        now = self.length(request)
        if not self.adaptive or not num_drafts:
            return now
        return min(self.maximum, now + 2) if num_accepted == num_drafts else max(1, now - 1)

    def forget(self, request: Request) -> None:
        """Drop the number of a request that has ended."""
        self._length.pop(request.request_id, None)
