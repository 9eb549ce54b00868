"""How many drafts a sequence is asked for, by what became of those before."""

from __future__ import annotations

from inferplane.engine.request.state import Request


class AdaptiveLength:
    """How many drafts to ask for: two more after all were accepted, one fewer after a rejection, at least one."""

    def __init__(self, most: int, adaptive: bool) -> None:
        self.most, self.adaptive = most, adaptive
        self._length: dict[int | str, int] = {}

    def length(self, request: Request) -> int:
        """Drafts to ask for now."""
        return self._length.get(request.request_id, self.most)

    def tell(self, request: Request, drafted: int, accepted: int) -> None:
        """Take in the outcome of a verification."""
        if self.adaptive and drafted:
            self._length[request.request_id] = self.after(request, drafted, accepted)

    def after(self, request: Request, drafted: int, accepted: int) -> int:
        """What `length` would be behind a verification."""
        now = self.length(request)
        if not self.adaptive or not drafted:
            return now
        return min(self.most, now + 2) if accepted == drafted else max(1, now - 1)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._length.pop(request.request_id, None)
