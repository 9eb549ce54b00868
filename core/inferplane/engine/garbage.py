"""What a process that serves does about Python's garbage collector."""

from __future__ import annotations

import gc


def let_be() -> None:
    """Take what is there out of the collector's sight: it stays to the end.

    Imported libraries are hundreds of thousands of objects. A full collection that walks through them was measured to
    stop a server for 0.2 to 0.3 s, once in some hundred requests.
    """
    gc.collect()
    gc.freeze()
