"""Continuous against static batching: the same requests, in turns, on the same engine.

    python benchmarks/batching.py
    python benchmarks/batching.py --turns 5 --json

64 requests with outputs of exponential lengths (mean 64, at most 512), at most 16 in a step. Two static ways: "static"
runs fixed batches that wait for their longest member, whose ended members cost nothing but their place; "padded" also
computes the rows of ended members, as generation over a rectangle of tokens does. The bar is 1.8 times the output
tokens a second of static batching.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import replace
from statistics import median

import torch
from shapes import SHAPES, add_clock, clock_name, config

from inferplane import LLM, SamplingParams
from inferplane.cli.verbs.bench import job_runner, workload
from inferplane.cli.verbs.bench.length_distribution import parse_lengths

BAR, BATCH, REQUESTS = 1.8, 16, 64
GREEDY = SamplingParams(temperature=0)


def padded(jobs):
    """The jobs with everybody's output as long as that of the longest in its batch."""
    out = []
    for i in range(0, len(jobs), BATCH):
        batch = jobs[i : i + BATCH]
        longest = max(job.output_tokens for job in batch)
        out += [replace(job, output_tokens=longest) for job in batch]
    return out


def turn(engine, jobs, order, clock):
    """Output tokens a second of each way, and how many steps it took; only tokens that were asked for count."""
    ways = {
        "continuous": lambda: job_runner.run_jobs(engine, jobs, GREEDY, lambda: None, clock=clock),
        "static": lambda: job_runner.run_jobs(engine, jobs, GREEDY, lambda: None, BATCH, clock),
        "padded": lambda: job_runner.run_jobs(engine, padded(jobs), GREEDY, lambda: None, BATCH, clock),
    }
    asked = sum(job.output_tokens for job in jobs)
    found = {}
    for name in order:
        trace = ways[name]()
        spent = [step.spent_s for step in trace.steps]
        found[name] = {"tokens_per_s": asked / trace.duration_s, "steps": len(spent), "spent_s": spent}
    return found


def fastest(turns, name):
    """Seconds of all steps of a way, each the fastest of its turns: what a busy machine adds is not the engine's."""
    return sum(min(step) for step in zip(*(t[name]["spent_s"] for t in turns)))


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="turns of all ways")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seed", type=int, default=0, help="of lengths and tokens")
    parser.add_argument("--shape", choices=list(SHAPES), default="wide", help="which model, see shapes.py")
    parser.add_argument("--device", default="cpu")
    add_clock(parser)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    shape = config(SHAPES[args.shape], 1024)
    llm = LLM(
        shape,
        device=args.device,
        dtype="bfloat16",
        load_format="dummy",
        max_num_seqs=BATCH,
        enable_prefix_caching=False,
    )
    ids = range(shape["vocab_size"])
    jobs = workload.random_jobs(args.requests, parse_lengths("16-64"), parse_lengths("exp:64:512"), ids, args.seed)
    turn(llm.engine, jobs[:BATCH], ["continuous"], args.clock)  # warm
    names = ["continuous", "static", "padded"]
    turns = [turn(llm.engine, jobs, names if i % 2 == 0 else names[::-1], args.clock) for i in range(args.turns)]
    ratios = {
        name: [t["continuous"]["tokens_per_s"] / t[name]["tokens_per_s"] for t in turns]
        for name in ("static", "padded")
    }
    best = {name: fastest(turns, name) / fastest(turns, "continuous") for name in ("static", "padded")}
    for t in turns:
        for name in names:
            del t[name]["spent_s"]
    told = {
        "benchmark": "batching",
        "bar": BAR,
        "batch": BATCH,
        "shape": args.shape,
        "requests": args.requests,
        "output_tokens": sum(job.output_tokens for job in jobs),
        "turns": turns,
        "continuous_over": ratios,
        "continuous_over_by_fastest_steps": best,
        "device": llm.device,
        "threads": torch.get_num_threads(),
        "clock": clock_name(args.clock),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    if args.json:
        print(json.dumps(told, indent=1))
        return
    print(f"{args.requests} requests, {told['output_tokens']} output tokens, batch {BATCH}, model {args.shape}")
    print(f"{'':<12} {'steps':>6} {'tokens/s: median':>17} {'min':>7} {'max':>7}   continuous over it")
    for name in names:
        speeds = [t[name]["tokens_per_s"] for t in turns]
        over = ""
        if name in ratios:
            over = f"{median(ratios[name]):.2f} ({min(ratios[name]):.2f} to {max(ratios[name]):.2f})"
            over += f", by fastest steps {best[name]:.2f}"
        steps = turns[0][name]["steps"]
        print(f"{name:<12} {steps:>6} {median(speeds):>17.1f} {min(speeds):>7.1f} {max(speeds):>7.1f}   {over}")
    print(f"bar: {BAR} over static")


if __name__ == "__main__":
    main()
