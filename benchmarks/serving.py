"""What the server adds to its engine, how fast it refuses, how it stands abuse, how long it takes to start: one run.

    python benchmarks/serving.py
    python benchmarks/serving.py --model 0.1b --only overhead --turns 4
    python benchmarks/serving.py --http-workers 2 --json

Start: from the command to the log's "ready", the median of three (the bar is 5 s). Overhead: 64 streams of greedy
tokens through `AsyncLLM(process=True)` in this process and through HTTP, by turns whose order changes, the same model
and options on both sides (the bar is 8 %). Refusals: 200 streams of 32 tokens at a queue of 128, five times, every
stream counted at its end; a refusal's time is from before its connection is opened to the end of the 429 (the bar is
100 ms at the 99th percentile). Abuse: the 99th percentile of eight clients' requests before and while 40 connections
misbehave (the bar is twice).

HTTP's clients are a process of their own (`serving_clients.py`), which reads bare sockets by epoll; its CPU
seconds are told beside, with those of the server's own processes and of this one while it calls the engine (the
engine's are in neither). On a machine with few cores they are taken from server and engine, and so count as overhead.
What else runs on the machine only adds to a time, and not evenly: `overhead` compares the medians of all turns,
`overhead_best` the quickest turn of each side. The model "0.1b" has the shape of a small Llama (30 layers of 576),
random weights and the demo model's vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median, quantiles

from serving_clients import prompt

from inferplane import AsyncLLM, SamplingParams

STREAMS, CROWD, CROWD_TOKENS, QUEUE = 64, 200, 32, 128
BURSTS, STARTS, CLIENTS, HOSTILE, STEADY_S = 5, 3, 8, 40, 8
BARS = {"start_s": 5.0, "overhead": 0.08, "refusal_p99_s": 0.1, "abuse_ratio": 2.0}
PARTS = ("start", "overhead", "refusals", "abuse")
TICKS = os.sysconf("SC_CLK_TCK")
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def folder_of(model, stack):
    """The model's name or folder, and how it is loaded."""
    if model == "demo":
        return model, {}
    import inferplane.models

    demo = Path(inferplane.models.__file__).parent / "demo"
    folder = Path(tempfile.mkdtemp())
    stack.append(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, folder)
    vocab = json.loads((demo / "config.json").read_text())["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": vocab}))
    return str(folder), {"load_format": "dummy"}


class Server:
    """`inferplane serve`, ready; `start_s` from the command to there."""

    def __init__(self, model, *args):
        begun = time.monotonic()
        options = ("--device", "cpu", "--port", "0", "--log-format", "json", "--log-level", "info")
        command = [sys.executable, "-m", "inferplane", "serve", model, *options, *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r'"http": "[^"]*:(\d+)"', line):
                self.port = int(found[1])
            if '"event": "ready"' in line:
                break
        else:
            raise SystemExit("the server did not start")
        self.start_s = time.monotonic() - begun
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def cpu_s(self):
        """CPU seconds of the server's own processes, without the engine's."""
        found = 0.0
        for pid in [self.process.pid, *children(self.process.pid)]:
            if b"clients.process.server" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found += (int(fields[11]) + int(fields[12])) / TICKS
        return found

    def end(self):
        self.process.terminate()
        self.process.wait(60)


def children(pid):
    """A process's children; Linux tells them."""
    return [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]


class Clients:
    """A process of clients."""

    def __init__(self):
        command = [sys.executable, str(Path(__file__).with_name("serving_clients.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self, do, **task):
        self.process.stdin.write(json.dumps({"do": do, **task}) + "\n")
        self.process.stdin.flush()

    def result(self):
        return json.loads(self.process.stdout.readline())

    def ask(self, do, **task):
        self.begin(do, **task)
        return self.result()

    def end(self):
        self.process.stdin.close()
        self.process.wait(10)


async def by_engine(engine, tokens, at):
    """Seconds for 64 streams without HTTP."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

    async def one(i):
        async for _ in engine.generate(prompt(i), params):
            pass

    begun = time.monotonic()
    await asyncio.gather(*(one(at + i) for i in range(STREAMS)))
    return time.monotonic() - begun


async def overhead(server, clients, model, options, tokens, turns):
    """Seconds with and without HTTP, turn by turn."""
    alone, http, caller_s, client_s, server_s, events = [], [], [], [], [], 0
    async with AsyncLLM(model, device="cpu", process=True, max_num_seqs=STREAMS, **options) as engine:
        task = {"port": server.port, "count": STREAMS, "tokens": tokens}
        await by_engine(engine, tokens, 0)
        clients.ask("streams", **task, at=0)
        for turn in range(turns):
            at = 1000 * (turn + 1)
            for side in ("engine", "http") if turn % 2 == 0 else ("http", "engine"):
                if side == "engine":
                    before = time.process_time()
                    alone.append(await by_engine(engine, tokens, at))
                    caller_s.append(time.process_time() - before)
                    continue
                before = server.cpu_s()
                found = clients.ask("streams", **task, at=at)
                server_s.append(server.cpu_s() - before)
                http.append(found["seconds"])
                client_s.append(found["cpu_s"])
                events = found["events"]
    return {
        "engine_s": [round(t, 3) for t in alone],
        "http_s": [round(t, 3) for t in http],
        "overhead": round(median(http) / median(alone) - 1, 4),
        "overhead_best": round(min(http) / min(alone) - 1, 4),
        "events": events,
        "caller_cpu_s": round(median(caller_s), 3),
        "server_cpu_s": round(median(server_s), 3),
        "clients_cpu_s": round(median(client_s), 3),
        "tokens_per_s": round(STREAMS * tokens / median(http), 1),
    }


def p99(seconds):
    return round(quantiles(seconds, n=100, method="inclusive")[98], 4) if len(seconds) > 1 else None


def refusals(server, clients):
    """Crowds, and how long it took to refuse them."""
    task = {"port": server.port, "count": CROWD, "tokens": CROWD_TOKENS}
    found = [clients.ask("burst", **task, at=100_000 + 1000 * i) for i in range(BURSTS)]
    waits = [t for f in found for t in f["refusals_s"]]
    ends = {"streams": CROWD * BURSTS, "ended_whole": sum(f["whole"] for f in found), "refused": len(waits)}
    return {**ends, "refusal_p50_s": round(median(waits), 4), "refusal_p99_s": p99(waits)}


def abuse(server, clients):
    """Other clients' requests, before and while."""
    task = {"port": server.port, "count": CLIENTS, "tokens": CROWD_TOKENS, "seconds": STEADY_S}
    before = clients.ask("steady", **task, at=200_000)["took_s"]
    hostile = Clients()
    hostile.begin("abuse", port=server.port, count=HOSTILE, seconds=STEADY_S + 2)
    time.sleep(1)
    meanwhile = clients.ask("steady", **task, at=300_000)["took_s"]
    sent = hostile.result()["hostile_requests"]
    hostile.end()
    found = {"before_p99_s": p99(before), "while_p99_s": p99(meanwhile), "hostile_requests": sent}
    return {**found, "requests": [len(before), len(meanwhile)], "abuse_ratio": round(p99(meanwhile) / p99(before), 2)}


def measure(args, model, options):
    found = {"model": args.model, "http_workers": args.http_workers, "cores": os.cpu_count()}
    more = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    sizes = ("--max-num-seqs", str(STREAMS), "--max-waiting", str(QUEUE - STREAMS))
    flags = (*sizes, "--http-workers", str(args.http_workers), *more)
    if "start" in args.only:
        starts = []
        for _ in range(STARTS):
            server = Server(model, *flags)
            starts.append(server.start_s)
            server.end()
        found.update(starts_s=[round(s, 2) for s in starts], start_s=round(median(starts), 2))
    server, clients = Server(model, *flags), Clients()
    try:
        if "overhead" in args.only:
            found.update(asyncio.run(overhead(server, clients, model, options, args.tokens, args.turns)))
        if "refusals" in args.only:
            found.update(refusals(server, clients))
        if "abuse" in args.only:
            found.update(abuse(server, clients))
    finally:
        clients.end()
        server.end()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "0.1b"), default="demo")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tokens", type=int, default=128, help="of each of the 64 streams")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--http-workers", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    made = []
    try:
        found = measure(args, *folder_of(args.model, made))
    finally:
        for folder in made:
            shutil.rmtree(folder)
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        bar = f"   (bar {BARS[name]})" if name in BARS else ""
        print(f"{name:16}{value}{bar}")


if __name__ == "__main__":
    main()
