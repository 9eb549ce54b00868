"""What scheduling costs: `Scheduler.schedule`, `queries` and `commit` of one step, without a model.

    python benchmarks/scheduling.py            # a table
    python benchmarks/scheduling.py --json

The fastest step of each case counts beside the median: what a busy machine adds is never the code's own. The bar is
0.4 ms a step (schedule and commit) at 64 sequences.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from statistics import median

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.state import Request
from inferplane.engine.schedule.scheduler import Limits, Scheduler
from inferplane.kvcache import BlockAllocator, BlockPools, root_hash

BAR_MS = 0.4
BLOCK_TOKENS = 16
PARAMS = SamplingParams(max_tokens=100_000, temperature=0)


def scheduler(sequences, waiting, blocks=500_000):
    """One with this many sequences that decode, and this many that wait."""
    limits = Limits(sequences, 2048, 10_000_000, 64)
    pools = BlockPools([BlockAllocator(blocks)])
    made = Scheduler(pools, BLOCK_TOKENS, limits, lambda tenant: root_hash("bench", tenant))
    draw = random.Random(0)
    for i in range(sequences + waiting):
        prompt = [draw.randrange(32_000) for _ in range(draw.randrange(16, 512))]
        made.add(Request(i, prompt, PARAMS, tenant=str(i % 4), priority=i % 2))
    return made


def step(made, drafts):
    """One step; seconds spent in schedule, queries, commit, and what was scheduled."""
    begun = time.perf_counter()
    chosen = made.schedule()
    scheduled = time.perf_counter()
    made.queries(chosen)
    asked = time.perf_counter()
    for s in chosen:
        if s.samples_next:
            s.request.generated += [7] * (1 + len(s.drafts))
    accepted = time.perf_counter()
    for s in chosen:
        made.commit(s, len(s.drafts))
    done = time.perf_counter()
    for s in chosen:
        if s.request.remaining == 1:
            s.request.drafts = [7] * drafts
    return scheduled - begun, asked - scheduled, done - accepted, chosen


def measure(sequences, waiting, drafts, steps):
    """One case: milliseconds a step, prefill left out."""
    made = scheduler(sequences, waiting)
    while any(r.remaining > 1 for r in made.running) or len(made.running) < sequences:
        step(made, 0)
    told = [step(made, drafts)[:3] for _ in range(steps)]
    made.pools.check()
    both = [1e3 * (schedule + commit) for schedule, _, commit in told]
    parts = {name: 1e3 * median(t[i] for t in told) for i, name in enumerate(("schedule", "queries", "commit"))}
    case = f"{sequences} sequences, {waiting} waiting, {drafts} drafts"
    return {"case": case, "best_ms": min(both), "median_ms": median(both), "median_of_parts_ms": parts}


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps of each case")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    cases = ((64, 0, 0), (64, 256, 0), (64, 0, 3), (256, 0, 0))
    rows = [measure(*case, args.steps) for case in cases]
    told = {"benchmark": "scheduling", "bar_ms": BAR_MS, "results": rows}
    told |= {"python": platform.python_version(), "machine": platform.machine()}
    if args.json:
        print(json.dumps(told, indent=1))
        return
    print(
        f"{'ms a step':<40} {'best':>8} {'median':>8} {'schedule':>9} {'queries':>8} {'commit':>8}   bar {BAR_MS} at 64"
    )
    for r in rows:
        parts = "".join(f"{t:{w}.3f}" for t, w in zip(r["median_of_parts_ms"].values(), (10, 9, 9), strict=True))
        print(f"{r['case']:<40} {r['best_ms']:8.3f} {r['median_ms']:8.3f}{parts}")


if __name__ == "__main__":
    main()
