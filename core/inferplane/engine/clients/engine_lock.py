"""Callers of one model in several threads: one after the other."""

from __future__ import annotations

from collections import deque
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferplane.engine.loop.engine import Engine
    from inferplane.engine.request.state import Request


class Turns:
    """Whoever enters has the engine to himself; within his turn a thread may enter again.

    A stream is left where its iterator is dropped: in any thread, also while another has its turn. Who leaves does not
    wait for that, since the collector of garbage may make him leave anywhere, holding any lock, or in the middle of any
    call of the engine: the request is ended by whoever has the turn, before his next step or when he is done.

    Args:
        engine: what they call.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = RLock()
        self._left: deque[Request] = deque()
        self._inside = 0  # how often who has the turn has entered

    def __enter__(self) -> None:
        self._turn.acquire()
        self._inside += 1

    def __exit__(self, *unused: object) -> None:
        self._inside -= 1
        self._turn.release()
        self._end_left()

    def step(self) -> None:
        """One step of the engine, by who has the turn."""
        self._end_all()
        self._engine.step()

    def leave(self, request: Request) -> None:
        """End a request whose caller is gone, now or by who has the turn."""
        self._left.append(request)
        self._end_left()

    def _end_left(self) -> None:
        while self._left and self._turn.acquire(blocking=False):
            try:
                if self._inside:  # it is this very thread that was made to leave: its call goes on first
                    return
                self._end_all()
            finally:
                self._turn.release()

    def _end_all(self) -> None:
        self._inside += 1
        try:
            while self._left:
                self._engine.end(self._left.popleft(), "abort")
        finally:
            self._inside -= 1
