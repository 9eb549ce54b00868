"""A server whose model is shared by two processes of torchrun: one answers, and both end together."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferplane import LLM, SamplingParams
from tests.house.rules import SOURCE_PATHS

PROMPT = "def fibonacci(n):"
SERVE = ("-m", "inferplane", "serve", "--device", "cpu", "--dtype", "float32", "--port", "0", "--log-format", "json")
START_S = 120
"""The longest silence of ranks that start."""


def left(mark: str) -> list[str]:
    """The commands of the processes that have `mark` in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ends meanwhile, or is another user's
            if mark.encode() in (place / "environ").read_bytes():
                found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def events(lines: queue.Queue[str]) -> Iterator[dict[str, Any]]:
    """What both ranks log, until nothing more comes for a while."""
    while True:
        line = lines.get(timeout=START_S)
        if line.startswith("{"):
            yield json.loads(line)


@pytest.fixture
def launcher_ranks():
    """torchrun with two ranks, the address that one of them listens at, and a mark in the environment of both."""
    mark = f"TEST_RANKS_MARK={uuid.uuid4().hex}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_PATHS), "OMP_NUM_THREADS": "1"}
    env |= dict([mark.split("=")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *SERVE]
    process = subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.PIPE, text=True)
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: [lines.put(line) for line in process.stderr], daemon=True).start()
    try:
        told = []
        for event in events(lines):
            told.append(event)
            if {"ready", "following"} <= {e["event"] for e in told}:
                break
        names = [e["event"] for e in told]
        assert names.count("listening") == names.count("following") == names.count("ready") == 1, told
        yield process, next(f"http://{e['http']}" for e in told if "http" in e), mark
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # torchrun ends its own children, wherever they are
        process.wait(60)


def test_two_ranks_serve_as_one(launcher_ranks):
    """The same tokens as one process; a signal to the launcher lets a live request end, and then no process is left."""
    process, url, mark = launcher_ranks
    assert len(left(mark)) >= 3, left(mark)  # the launcher and two ranks
    with LLM("demo", device="cpu", dtype="float32") as llm:
        want = llm.generate(PROMPT, SamplingParams(max_tokens=32, temperature=0))[0].text
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"] == want
    body |= {"max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: "))
        first = next(lines)
        process.send_signal(signal.SIGTERM)
        *_, last, done = [first, *lines]
    assert done == "data: [DONE]" and json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
    process.wait(60)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=5)
    deadline = time.monotonic() + 10
    while left(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left(mark)
