"""What a process that serves does about Python's garbage collector."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_gc() -> None:
    """Take what is there out of the collector's sight: it stays to the end.

    Imported libraries are hundreds of thousands of objects. A full collection that walks through them was measured to
    stop a server for 0.2 to 0.3 s, once in some hundred requests.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def importing() -> Iterator[None]:
    """Let nobody look for garbage among libraries while they are imported, nor later: they stay to the end.

    The collector walks again and again through what grows: a fifth of the time until `inferplane generate` writes. For
    programs of our own; a caller's objects are his to collect.
    """
    was, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:
            gc.freeze()
        if was:
            gc.enable()
