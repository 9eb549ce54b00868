#!/usr/bin/env python3
"""What a busy neighbour on one core costs decoding with two threads, beside torch in the same run.

    python benchmarks/cpu/neighbour.py --shape qwen3-0.6b

The neighbour is a process that does nothing but count, bound to one core. Each turn measures both engines without it
and with it. Two threads that share two cores evenly with a third have 1.33 of the time to spend, and up to 2 where the
work is cut in halves before it starts; a pool that spins while it waits takes many times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from models import add_arguments, checkpoint
from turns import Process

CONTEXT, TOKENS = 128, 12
COUNT = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"


@contextmanager
def neighbour():
    """While it lasts, one core has another process to serve."""
    process = subprocess.Popen([sys.executable, "-c", COUNT])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "small", turns=7)
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("This needs two cores.")
    os.environ["OMP_NUM_THREADS"] = "2"
    ask = f"decode {CONTEXT} {TOKENS} 1"
    with checkpoint(args) as folder:
        limits = (str(CONTEXT + TOKENS + 1), "1")
        peers = [Process(sys.executable, name, folder, limits) for name in ("inferplane:bf16", "transformers:sdpa")]
        found = {peer.name: [] for peer in peers}
        for turn in range(args.turns + 1):  # the first warms up
            for peer in peers:
                alone = peer.ask(ask)
                with neighbour():
                    beside = peer.ask(ask)
                if turn:
                    found[peer.name].append((alone, beside))
        for peer in peers:
            peer.close()
    report = {}
    for name, runs in found.items():
        ratios = [beside / alone for alone, beside in runs]
        report[name] = {
            "alone_ms": statistics.median(a for a, _ in runs) * 1e3,
            "beside_ms": statistics.median(b for _, b in runs) * 1e3,
            "slower_by": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
        }
        r = report[name]
        print(
            f"{name:20} {r['alone_ms']:7.1f} ms a token, {r['beside_ms']:7.1f} beside a busy neighbour: "
            f"{r['slower_by']:.2f} x ({r['spread'][0]:.2f} to {r['spread'][1]:.2f})"
        )
    if args.json:
        Path(args.json).write_text(json.dumps({"shape": args.shape, "turns": args.turns, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
