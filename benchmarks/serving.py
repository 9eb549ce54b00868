"""What the server adds to its engine, how fast it refuses, and how long it takes to start. All in one run.

    python benchmarks/serving.py
    python benchmarks/serving.py --turns 5 --json

Overhead: 64 streams of 32 greedy tokens from the demo model, by turns through `AsyncLLM(process=True)` and through HTTP
(the bar is 8 %). Refusals: 200 streams at a queue of 128, every one counted at its end, and the times from a request to
its 429 (the bar is 100 ms at the 99th percentile). Start: from the command to the log's "ready" (the bar is 5 s). The
client shares the machine with the server; its own share is part of what is told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from statistics import median, quantiles

from inferplane import AsyncLLM, SamplingParams

STREAMS, TOKENS = 64, 32
CROWD, QUEUE = 200, 128
BARS = {"overhead": 0.08, "refusal_p99_s": 0.1, "start_s": 5.0}
PARAMS = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
OPTIONS = ("--device", "cpu", "--port", "0", "--log-format", "json", "--log-level", "info")


def prompt(i):
    """A prompt of its own for each stream, so that none is in the cache."""
    return f"def function_{i}(a, b):\n    return "


def start(*args):
    """A server, its port, and seconds until it was ready."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "inferplane", "serve", *OPTIONS, *args]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    port = None
    for line in process.stderr:
        found = re.search(r'"http": "[^"]*:(\d+)"', line)
        port = int(found[1]) if found else port
        if '"event": "ready"' in line:
            break
    else:
        raise SystemExit("the server did not start")
    threading.Thread(target=process.stderr.read, daemon=True).start()
    return process, port, time.monotonic() - begun


async def ask(port, i):
    """One stream by HTTP: its status, seconds to the status line, seconds in all, events."""
    body = {"prompt": prompt(i), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n"
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
    status = int((await reader.readline()).split()[1])
    first = time.monotonic() - begun
    answer = await reader.read()
    writer.close()
    done = answer.count(b"data: [DONE]")
    return status, first, time.monotonic() - begun, done


async def by_http(port, streams, at):
    """Seconds for so many streams."""
    begun = time.monotonic()
    ends = await asyncio.gather(*(ask(port, at + i) for i in range(streams)))
    assert all(status == 200 and done == 1 for status, _, _, done in ends), Counter(e[0] for e in ends)
    return time.monotonic() - begun


async def by_engine(engine, streams, at):
    """Seconds for so many streams."""

    async def one(i):
        async for _ in engine.generate(prompt(i), PARAMS):
            pass

    begun = time.monotonic()
    await asyncio.gather(*(one(at + i) for i in range(streams)))
    return time.monotonic() - begun


async def overhead(port, turns):
    """Ratios of HTTP's time to the engine's, turn by turn."""
    async with AsyncLLM("demo", device="cpu", process=True, max_batch=STREAMS) as engine:
        await by_engine(engine, 4, 0)
        await by_http(port, 4, 0)
        pairs = []
        for turn in range(turns):
            at = 1000 * (turn + 1)
            pairs.append((await by_engine(engine, STREAMS, at), await by_http(port, STREAMS, at)))
    return pairs


async def crowd(port):
    """Every end of a crowd of streams, and how long refusals took."""
    ends = await asyncio.gather(*(ask(port, 100_000 + i) for i in range(CROWD)))
    refused = sorted(e[2] for e in ends if e[0] == 429)
    whole = sum(e[0] == 200 and e[3] == 1 for e in ends)
    return {"streams": CROWD, "ended_whole": whole, "refused": len(refused), "refusals_s": refused}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    process, port, ready_s = start("--max-batch", str(STREAMS), "--max-waiting", str(QUEUE - STREAMS))
    try:
        pairs = asyncio.run(overhead(port, args.turns))
        many = asyncio.run(crowd(port))
    finally:
        process.terminate()
        process.wait(60)
    waits = many.pop("refusals_s")
    found = {
        "machine": f"{platform.processor() or platform.machine()}",
        "start_s": round(ready_s, 2),
        "engine_s": [round(a, 3) for a, _ in pairs],
        "http_s": [round(b, 3) for _, b in pairs],
        "overhead": round(median(b for _, b in pairs) / median(a for a, _ in pairs) - 1, 4),
        "tokens_per_s": round(STREAMS * TOKENS / median(b for _, b in pairs), 1),
        **many,
        "refusal_p99_s": round(quantiles(waits, n=100)[98], 4) if len(waits) > 1 else None,
    }
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        bar = f"   (bar {BARS[name]})" if name in BARS else ""
        print(f"{name:16}{value}{bar}")


if __name__ == "__main__":
    main()
