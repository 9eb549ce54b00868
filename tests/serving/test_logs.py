"""Lines of the log are written together, and each stays whole."""

from __future__ import annotations

import json
import os
import threading
import time
from itertools import pairwise

from inferplane.serving.logs import PIPE_ATOMIC_BYTES, Writer, _join_lines


def test_lines_go_out_in_order_and_whole_in_as_few_writes_as_a_pipe_keeps_together():
    lines = [str(i) * (1 + 37 * i % 900) for i in range(100)] + ["x" * (2 * PIPE_ATOMIC_BYTES), "y"]
    pieces = list(_join_lines(lines))
    assert "".join(pieces) == "".join(f"{line}\n" for line in lines)
    assert all(len(p) <= PIPE_ATOMIC_BYTES or p.count("\n") == 1 for p in pieces)
    assert all(len(a) + len(b.partition("\n")[0]) >= PIPE_ATOMIC_BYTES for a, b in pairwise(pieces)), "none is spared"
    assert not list(_join_lines([]))


def test_two_processes_that_share_a_pipe_whose_reader_is_behind():
    """Each writes its batches; no line of one is within a line of the other."""
    read, write = os.pipe()
    writers = [Writer(os.fdopen(os.dup(write), "w")) for _ in range(2)]
    for k, writer in enumerate(writers):
        for i in range(400):
            writer._lines.put_nowait(json.dumps({"worker": k, "number": i, "more": "z" * 250}))
    found: list[bytes] = []

    def reading() -> None:
        time.sleep(0.3)  # meanwhile the pipe fills
        while data := os.read(read, 1000):
            found.append(data)

    reader = threading.Thread(target=reading)
    reader.start()
    for writer in writers:
        writer.finish(30)
        writer._out.close()
    os.close(write)
    reader.join(30)
    events = [json.loads(line) for line in b"".join(found).splitlines()]
    for k in range(2):
        assert [e["number"] for e in events if e["worker"] == k] == list(range(400))
