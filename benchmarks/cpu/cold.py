#!/usr/bin/env python3
"""From a cold page cache: a model's load to its first token, beside reading its files once.

    python benchmarks/cpu/cold.py --shape llama-3.2-1b          # 2.5 GB of disk

Each turn drops the checkpoint from the page cache, reads it once in order, drops it again, and loads it in a new
process that has imported all it needs (the modules of a first, uncounted start); the clock runs from `LLM(...)` to the
token.
Bar: at most 1.5 x the time to read the files. Linux only, with `fincore`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from models import add_arguments, checkpoint

BAR = 1.5
CHUNK = 8 * 2**20
MOST_CACHED = 0.01
"""Share of the files that may be left in the page cache."""
START = """
import contextlib, importlib, json, sys, time
for name in json.loads(sys.stdin.readline()):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
from inferplane import LLM, SamplingParams
sys.stdout.write("imported\\n"); sys.stdout.flush(); sys.stdin.readline()
start = time.perf_counter()
llm = LLM(sys.argv[1], device="cpu", dtype="bfloat16", kv_cache_bytes=64 * 2**20)
loaded = time.perf_counter()
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0))
end = time.perf_counter()
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
modules = [n for n, m in sys.modules.items() if getattr(m, "__spec__", None) and n != "__main__"]
print(json.dumps({"load_s": loaded - start, "first_token_s": end - start, "peak_bytes": peak, "modules": modules}))
"""


def drop(files):
    """Take files out of the page cache, and see that they are."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if (left := cached(files)) > MOST_CACHED * sum(f.stat().st_size for f in files):
        raise SystemExit(f"{left} bytes stay in the page cache: choose a --folder on a disk")


def cached(files):
    """Bytes of files in the page cache, as `fincore` of util-linux counts them."""
    command = ["fincore", "-b", "-n", "-o", "RES", *map(str, files)]
    return sum(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


def read(files):
    """Seconds to read them once."""
    room = bytearray(CHUNK)
    start = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(room):
                pass
    return time.perf_counter() - start


def load(folder, modules, before):
    """What a new process reports; `before` is called when it has imported everything."""
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdin.write(json.dumps(modules) + "\n")
    process.stdin.flush()
    while process.stdout.readline().strip() != "imported":
        if process.poll() is not None:
            raise SystemExit(f"a start ended with {process.returncode}")
    before()
    out, _ = process.communicate("\n")
    return json.loads(out.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "llama-3.2-1b", turns=5)
    args = parser.parse_args()
    with checkpoint(args) as folder:
        files = sorted(folder.glob("*.safetensors"))
        size = sum(f.stat().st_size for f in files)
        modules = load(folder, [], lambda: None)["modules"]
        turns = []
        for _ in range(args.turns):
            drop(files)
            seconds = read(files)
            started = load(folder, modules, lambda: drop(files))
            del started["modules"]
            turns.append({"read_s": seconds, **started})
    ratios = [t["first_token_s"] / t["read_s"] for t in turns]
    ratio = statistics.median(ratios)
    report = {"shape": args.shape, "file_bytes": size, "ratio": ratio, "ratios": sorted(ratios), "bar": BAR}
    for t in turns:
        print(
            f"read {t['read_s']:.2f} s ({size / t['read_s'] / 1e9:.2f} GB/s),"
            f" loaded {t['load_s']:.2f} s, first token {t['first_token_s']:.2f} s, peak {t['peak_bytes'] / 1e6:.0f} MB"
        )
    print(f"first token over reading once: {ratio:.2f} (bar {BAR}) {'met' if ratio <= BAR else 'MISSED'}")
    if args.json:
        Path(args.json).write_text(json.dumps({**report, "turns": turns}, indent=1) + "\n")


if __name__ == "__main__":
    main()
