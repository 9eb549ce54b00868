"""Mixed requests to a server for a long time: each ends exactly once, and nothing grows.

    python -m tests.serving.soak 5000      # that many after a warm-up of 200, more than CI sends

Completions, chat and the native dialect, whole and streamed, with schemas, log-probabilities and several sequences, and
gRPC; a fifth of them is broken off at some point, a twentieth is wrong in some way. After each round, at rest, blocks,
threads and descriptors of all the server's processes stand where they stood, and resident memory hardly grows.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from inferplane.serving.grpc import schema
from tests.serving.live import Live, engine_pids

CANCELLED, INVALID = 0.20, 0.05
AT_ONCE = 24
WARM_UP = 200
"""Requests before the first look: libraries are loaded and caches made at the first of each kind."""
ARGS = (
    *("--max-num-seqs", "16", "--max-waiting", "64", "--max-num-batched-tokens", "256"),
    *("--kv-cache-bytes", str(24 * 2**20), "--grpc-port", "0"),
)
"""Cache and steps are small, so that both are soon met whole: memory that is touched first counts as growth."""
MOST_GROWTH_BYTES = 2**20
"""Of resident memory, for a thousand requests, of the server and of the engine's process."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
PROMPTS = ("def main():", "import os\n", "class Stack:\n    def ", "x = [1, 2, ", "# Sorts a list\ndef sort(")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WRONG: tuple[tuple[str, Any], ...] = (
    (COMPLETIONS, {"prompt": "x", "temperature": -1}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 10**6}),
    (COMPLETIONS, {"prompt": [[1], []]}),
    (COMPLETIONS, b'{"prompt": "x"'),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}}),
    (CHAT, {"text": "x", "topp": 7}),
    (COMPLETIONS, {"text": "x", "max_dec_len": 0}),
    ("/v1/nowhere", {}),
    ("/tokenize", {}),
)


@dataclass
class Tally:
    """What became of requests, counted on the client's side.

    Args:
        ends: outcomes: "whole", "left", "refused".
        sent: ids of the HTTP requests that were read to their end.
        odd: answers that are none of these.
    """

    ends: Counter[str] = field(default_factory=Counter)
    sent: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)


def body(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A route and a valid request for it."""
    prompt = draw.choice(PROMPTS) + str(draw.randrange(500))
    if draw.random() < 0.05:
        prompt *= 60
    tokens, stream = draw.randint(1, 8), draw.random() < 0.5
    kind = draw.randrange(3)
    if kind == 2:
        return draw.choice((COMPLETIONS, CHAT)), {"text": prompt, "max_dec_len": tokens, "topp": 0.9, "stream": stream}
    asked: dict[str, Any] = {"max_tokens": tokens, "stream": stream, "temperature": draw.choice((0, 1))}
    if draw.random() < 0.15:
        asked["n"] = 2
    if kind == 0:
        asked["prompt"] = prompt if draw.random() < 0.8 else [prompt, "y"]
        if draw.random() < 0.2:
            asked["logprobs"] = 3
        return COMPLETIONS, asked
    asked["messages"] = [{"role": "user", "content": prompt}]
    if draw.random() < 0.2:
        asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    return CHAT, asked


def terminals(asked: dict[str, Any], text: str) -> tuple[int, int]:
    """Ends that an answer holds, and how many it should."""
    if "text" in asked:
        lines = [json.loads(line) for line in text.splitlines() if line]
        if not asked["stream"]:
            return sum(bool(e["finish_reason"]) for e in lines), 1
        ended = bool(lines and lines[-1]["is_end"] and not lines[-1]["error_code"])
        return sum(e["is_end"] for e in lines) if ended else 0, 1
    prompt = asked.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    wanted = asked.get("n", 1) * prompts
    if not asked["stream"]:
        return sum(bool(c["finish_reason"]) for c in json.loads(text)["choices"]), wanted
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    done = events.count("[DONE]") == 1 and events[-1] == "[DONE]"
    choices = [c for e in events if e != "[DONE]" for c in json.loads(e).get("choices", ())]
    return sum(c["finish_reason"] is not None for c in choices) if done else 0, wanted


class Soak:
    """Sends requests to a server and keeps count.

    Args:
        server: a live one with gRPC, started with `ARGS`.
        seed: of the mix.
    """

    def __init__(self, server: Live, seed: int = 1) -> None:
        self.server, self.tally = server, Tally()
        self._draw = random.Random(seed)
        self._number = 0

    async def send(self, count: int) -> None:
        """Send a number of requests, `AT_ONCE` at a time."""
        gate = asyncio.Semaphore(AT_ONCE)
        limits = httpx.Limits(max_connections=AT_ONCE + 8)
        address = self.server.event("listening")["grpc"]
        async with (
            httpx.AsyncClient(base_url=self.server.url, timeout=120, limits=limits) as client,
            grpc.aio.insecure_channel(address) as channel,
        ):

            async def one(draw: random.Random, name: str) -> None:
                async with gate:
                    try:
                        await self._one(client, channel, draw, name)
                    except Exception as error:
                        self.tally.odd.append(f"{type(error).__name__}: {error}")

            names = [f"soak-{self._number + i}" for i in range(count)]
            self._number += count
            await asyncio.gather(*(one(random.Random(self._draw.random()), name) for name in names))

    async def _one(self, client: httpx.AsyncClient, channel: Any, draw: random.Random, name: str) -> None:
        fate = draw.random()
        if fate < INVALID:
            await self._wrong(client, draw, name)
        elif draw.random() < 0.15:
            await self._call(channel, draw, leave=fate < INVALID + CANCELLED)
        elif fate < INVALID + CANCELLED:
            await self._leave(client, draw)
        else:
            path, asked = body(draw)
            answer = await client.post(path, json=asked, headers={"x-request-id": name})
            self.tally.sent.append(name)
            found, wanted = terminals(asked, answer.text) if answer.status_code == 200 else (-1, 0)
            if found == wanted:
                self.tally.ends["whole"] += 1
            else:
                self.tally.odd.append(f"{asked}: {answer.status_code}, {found} ends of {wanted}: {answer.text[:300]}")

    async def _wrong(self, client: httpx.AsyncClient, draw: random.Random, name: str) -> None:
        path, asked = draw.choice(WRONG)
        data = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
        headers = {"x-request-id": name, "content-type": "application/json"}
        answer = await client.post(path, content=data, headers=headers)
        self.tally.sent.append(name)
        if 400 <= answer.status_code < 500:
            self.tally.ends["refused"] += 1
        else:
            self.tally.odd.append(f"{asked}: {answer.status_code}")

    async def _leave(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Break off before the answer, or after some lines of it."""
        path, asked = body(draw)
        asked.update({"max_dec_len": 200} if "text" in asked else {"max_tokens": 200})
        if not asked["stream"] or draw.random() < 0.3:
            try:
                await asyncio.wait_for(client.post(path, json=asked), draw.choice((0.002, 0.02, 0.1)))
            except asyncio.TimeoutError:
                self.tally.ends["left"] += 1
            else:
                self.tally.ends["whole"] += 1
            return
        async with client.stream("POST", path, json=asked) as answer:
            lines, left = answer.aiter_lines(), draw.randint(0, 6)
            async for _ in lines:
                left -= 1
                if left < 0:
                    break
        self.tally.ends["left"] += 1

    async def _call(self, channel: Any, draw: random.Random, *, leave: bool) -> None:
        """A request over gRPC: one call, or a stream of one request."""
        native = {"text": draw.choice(PROMPTS), "max_dec_len": 200 if leave else draw.randint(1, 8)}
        inputs = [{"name": "IN", "datatype": "BYTES", "shape": [1]}]
        data = json.dumps(native).encode()
        method = draw.choice(("ModelInfer", "ModelStreamInfer"))
        asked, answered = schema.method_types(method)
        request = asked(model_name="model", inputs=inputs, raw_input_contents=[len(data).to_bytes(4, "little") + data])
        kinds = {"request_serializer": asked.SerializeToString, "response_deserializer": answered.FromString}
        name = f"/{schema.SERVICE}/{method}"
        if method == "ModelInfer":
            call = channel.unary_unary(name, **kinds)(request, timeout=120)
            ends = 1
            if leave:
                await asyncio.sleep(draw.choice((0.002, 0.02, 0.1)))
            else:
                await call
        else:
            call = channel.stream_stream(name, **kinds)(_only(request), timeout=120)
            ends = 0
            async for response in call:
                ends += response.infer_response.parameters["triton_final_response"].bool_param
                if leave:
                    break
        if leave:
            call.cancel()
            self.tally.ends["left"] += 1
        elif ends == 1:
            self.tally.ends["whole"] += 1
        else:
            self.tally.odd.append(f"{method}: {ends} ends")


async def _only(request: Any) -> AsyncIterator[Any]:
    yield request


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    threads: int
    descriptors: int
    resident_bytes: int


def held(pid: int) -> Held:
    """What a process holds now; descriptors without those of connections that close just now."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = {
        line.split(":")[0]: line.split()[1] for line in status.splitlines() if ":" in line and len(line.split()) > 1
    }
    return Held(int(values["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), int(values["VmRSS"]) * 1024)


def at_rest(server: Live) -> dict[str, Held]:
    """What the server's processes hold once nothing runs and no connection is left: the same twice in a row."""
    server.at_rest()
    names = {"server": server.process.pid, **{f"child {i}": pid for i, pid in enumerate(sorted(engine_pids(server)))}}
    limit, last = time.monotonic() + 20, None
    while True:
        now = {name: held(pid) for name, pid in names.items()}
        flat = {name: (h.threads, h.descriptors) for name, h in now.items()}
        if flat == last or time.monotonic() > limit:
            return now
        last = flat
        time.sleep(0.5)  # longer than IDLE_S, after which an engine returns what it freed


def growth(points: list[tuple[int, int]]) -> float:
    """Bytes for a thousand requests: the least-squares slope of (requests, bytes)."""
    x, y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    over = sum((p[0] - x) ** 2 for p in points)
    return 1000 * sum((p[0] - x) * (p[1] - y) for p in points) / over


def main() -> int:
    """Soak one server; the exit code."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    step, seen = max(100, count // 10), []
    with Live(*ARGS) as server:
        soak = Soak(server)
        asyncio.run(soak.send(WARM_UP))
        print(f"after {WARM_UP} requests for a warm-up:", flush=True)
        for done in range(0, count + 1, step):
            seen.append((done, at_rest(server)))
            shown = "   ".join(
                f"{n} {h.threads}t {h.descriptors}fd {h.resident_bytes / 2**20:.2f} MB" for n, h in seen[-1][1].items()
            )
            print(f"{done:6}  {shown}", flush=True)
            if done < count:
                asyncio.run(soak.send(min(step, count - done)))
        code = server.stop()
    ends = Counter(e["request_id"] for e in server.log if e["event"] == "request")
    grown = {name: growth([(n, holds[name].resident_bytes) for n, holds in seen]) for name in seen[0][1]}
    flat = all(
        (h.threads, h.descriptors) == (seen[0][1][name].threads, seen[0][1][name].descriptors)
        for name, h in seen[-1][1].items()
    )
    once = all(ends[name] == 1 for name in soak.tally.sent)
    print(f"ends: {dict(soak.tally.ends)}, odd: {len(soak.tally.odd)}, each once: {once}, exit code {code}")
    print("threads and descriptors:", "flat" if flat else "NOT FLAT")
    print("growth for 1,000:", ", ".join(f"{name} {g / 2**20:+.3f} MB" for name, g in grown.items()))
    for line in soak.tally.odd[:10]:
        print("odd:", line)
    good = once and flat and not soak.tally.odd and code == 0 and max(grown.values()) <= MOST_GROWTH_BYTES
    print("PASSED" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
