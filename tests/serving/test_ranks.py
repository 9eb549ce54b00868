"""A server whose model two processes share, started by torchrun: one answers, and both end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from inferplane import LLM, SamplingParams
from tests.house.rules import SOURCE_PATHS

PROMPT = "def fibonacci(n):"
SERVE = ("-m", "inferplane", "serve", "--device", "cpu", "--dtype", "float32", "--port", "0", "--log-format", "json")


@pytest.fixture
def launched():
    """torchrun with two ranks, and the address that one of them listens at."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_PATHS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *SERVE]
    process = subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.PIPE, text=True)
    address, events = "", []
    try:
        for line in process.stderr:
            if line.startswith("{"):
                events.append(json.loads(line))
                address = events[-1].get("http", address)
                if events[-1]["event"] == "ready":
                    break
        assert [e["event"] for e in events].count("listening") == 1, events
        assert [e["event"] for e in events].count("following") == 1, events
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process, f"http://{address}"
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # torchrun ends its own children, wherever they are
        process.wait(60)


def test_two_ranks_serve_as_one(launched):
    """The same tokens as one process; a signal to the launcher lets a live request end, and then nobody is left."""
    process, url = launched
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
