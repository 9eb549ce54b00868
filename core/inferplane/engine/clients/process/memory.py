"""Memory of processes that serve: the garbage collector, and freed memory that the C library still holds."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

M_ARENA_MAX = -8  # of mallopt(3), from malloc.h


def share_heap() -> bool:
    """Let all threads share one heap, if the C library is glibc; returns whether that succeeded. It makes resident
    memory smaller and constant.

    By default glibc gives threads heaps of their own, and which one a tensor or a grammar comes from is chance: with
    two threads resident memory varied by 3.5 MB under the demo model, now it is constant. A process that serves HTTP
    held 265 to 314 MB under attack with several heaps, and 143 to 182 MB with one. One thread does almost all the work
    here, or has Python's lock, so threads do not wait for the heap. Call it before there are other threads.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1))
    except (AttributeError, OSError, TypeError):
        return False


def memory_trimmer() -> Callable[[], object]:
    """A function that returns freed memory to the system; it does nothing if the C library has no such function.

    A step's tensors are freed between objects that stay, so that glibc's heaps hold more than is in use: 40 MB of
    183 MB after some thousand requests to the demo model, in pieces that its own trimming never reaches.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda: None
    return lambda: trim(0)


def freeze_gc() -> None:
    """Exclude all present objects from garbage collection: they stay to the end of the process.

    Imported libraries are hundreds of thousands of objects. A full collection that walks through them was measured to
    stop a server for 0.2 to 0.3 s, once in some hundred requests.

    A full collection also waits until a quarter as many objects are new as the last one left, frozen ones included:
    after thousands of connections it then took 0.24 s. So one is made when nothing is left to count.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection during imports and freeze what they created: libraries stay to the end.

    The collector walks through growing objects again and again: a fifth of the time until `inferplane generate`
    writes. For programs of our own; other programs decide about their objects themselves.
    """
    was_enabled, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:
            gc.freeze()
        if was_enabled:
            gc.enable()
