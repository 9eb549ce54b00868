"""`EngineLock`: several threads use one engine, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import RLock

from inferplane.engine.loop.engine import Engine
from inferplane.engine.request.state import Request


class EngineLock:
    """Re-entrant exclusive access to the engine.

    `abandon` never waits for another thread, because a generator's finalizer may run it anywhere: in any thread, with
    any lock held, or in the middle of any call of the engine. The thread that holds the lock ends the request, before
    its next step or when it releases the lock.

    Args:
        engine: what is locked.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = RLock()
        self._abandoned: deque[Request] = deque()
        self._depth = 0  # how often the thread that holds the lock has acquired it

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *unused: object) -> None:
        self._depth -= 1
        self._lock.release()
        self._end_abandoned()

    def step(self) -> None:
        """Run one step of the engine; the caller holds the lock. Requests that were abandoned meanwhile are ended
        before.
        """
        self._end_all()
        self._engine.step()

    def end_all(self, requests: Sequence[Request]) -> None:
        """End requests that have not ended, with "abort"; the caller holds the lock. Waits for the steps in flight if
        no other request runs or waits.
        """
        for request in requests:
            self._engine.end(request, "abort")
        self._engine.settle()

    def abandon(self, request: Request) -> None:
        """End a request whose caller has left, with "abort": now if the lock is free, else the thread that holds the
        lock ends it. From any thread; it waits for no other one, and only for the steps in flight of a request that
        was the last one, whose blocks are free afterwards.
        """
        self._abandoned.append(request)
        self._end_abandoned()

    def _end_abandoned(self) -> None:
        """End abandoned requests if no thread holds the lock, without waiting for it."""
        while self._abandoned and self._lock.acquire(blocking=False):
            try:
                if self._depth:  # this thread holds the lock already: its call goes on first
                    return
                self._end_all()
                self._engine.settle()
            finally:
                self._lock.release()

    def _end_all(self) -> None:
        """End all abandoned requests; the caller holds the lock."""
        self._depth += 1
        try:
            while self._abandoned:
                self._engine.end(self._abandoned.popleft(), "abort")
        finally:
            self._depth -= 1
