"""What the engine's process does about memory that was freed and is still held."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


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
