"""What the engine's process does about memory that was freed and is still held."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

M_ARENA_MAX = -8  # of mallopt(3), from malloc.h


def one_heap() -> bool:
    """Let all threads share one heap, where the C library is glibc; whether it could be told.

    By default glibc gives threads heaps of their own, and which one a tensor or a grammar comes from is chance: with
    two threads resident memory swung by 3.5 MB under the demo model, now it settles. One thread does almost all the
    work here, so nobody waits for the heap. To be called before there are other threads.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1))
    except (AttributeError, OSError, TypeError):
        return False


def trimmer() -> Callable[[], object]:
    """A function that returns freed memory to the system; it does nothing where the C library has no such function.

    A step's tensors come and go between objects that stay, so that glibc's heaps hold more than is in use: 40 MB of
    183 MB after some thousand requests to the demo model, in pieces at which its own trimming never arrives.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda: None
    return lambda: trim(0)
