"""Parses and checks large bodies: a script for a process of its own, which may hang, crash or grow without harm.

It is started by `large_bodies/reader.py`, isolated, and reads bodies from a file that it shares with the process that
serves. Its standard input is a line of setup, then a line per body; standard output, a line for each. All lines are
JSON.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
from typing import Any

NICENESS = 10
"""How far it gives way: where processors are few, streams go before large bodies."""


def _serve() -> None:
    """Read the setup and then lines about bodies from standard input; check each and write what was found."""
    lines = iter(sys.stdin)
    setup: dict[str, Any] = json.loads(next(lines))
    sys.path[:] = setup["path"]
    from inferplane.engine.clients.process.memory import memory_trimmer
    from inferplane.serving.http.body_checks import answer_check

    os.nice(NICENESS)
    trim = memory_trimmer()
    gc.freeze()
    print(json.dumps(""), flush=True)
    for line in lines:
        given = json.loads(line)
        with mmap.mmap(setup["file"], given["size"]) as memory:
            answer = answer_check(given["path"], memory[:], given["limits"], memory)
        print(json.dumps(answer), flush=True)
        trim()


if __name__ == "__main__":
    _serve()
