"""How long streams wait for their tokens while many prompts arrive, with a target between two tokens and without.

    python benchmarks/insertion.py
    python benchmarks/insertion.py --target 40 --prompts 16 --json

Streams decode; 64 prompts of 2,000 tokens arrive at once; the times between two tokens of each stream are measured
until every prompt has its first token. The target is, if it is not given, four times the median step of the streams
alone. The bar is a 99th percentile of at most 1.3 times the target. What the target costs stands beside it: the time
until all prompts are read, and the mean time of a prompt to its first token.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from dataclasses import replace
from statistics import mean, median

import torch
from shapes import SHAPES, config

from inferplane import LLM, SamplingParams
from inferplane.engine.schedule.insertion import Insertion

BAR, PERCENTILE = 1.3, 0.99
STREAMS, PROMPTS, PROMPT_TOKENS = 4, 64, 2000
ALONE_STEPS = 40


def add(engine, count, seed, most):
    """A request that will not end before `most` tokens."""
    draw = random.Random(seed)
    prompt = [draw.randrange(engine.vocab) for _ in range(count)]
    return engine.add(prompt, SamplingParams(max_tokens=most, ignore_eos=True, temperature=0), frozenset())


def percentile(values, share):
    """The smallest value that is no less than this share of them."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def begin(engine, most):
    """Streams that decode, and the median seconds of their steps alone."""
    streams = [add(engine, 16, 100 + i, most) for i in range(STREAMS)]
    spent = []
    for _ in range(ALONE_STEPS):
        begun = time.monotonic()
        engine.step()
        spent.append(time.monotonic() - begun)
    return streams, median(spent)


def measure(engine, prompts, prompt_tokens, target_ms):
    """Gaps of the streams and times of the prompts; without a target (None) and with it."""
    engine.scheduler.limits = replace(engine.scheduler.limits, insertion=Insertion(max_inter_token_ms=target_ms))
    streams, _ = begin(engine, engine.limits.max_model_len - 32)
    arrived, gaps = time.monotonic(), []
    last = {id(s): arrived for s in streams}
    waiting = {id(r): r for r in (add(engine, prompt_tokens, 1000 + i, 1) for i in range(prompts))}
    first = []
    while waiting:
        touched, now = {id(r) for r in engine.step()}, time.monotonic()
        gaps += [now - last[key] for key in last if key in touched]
        last.update((key, now) for key in last if key in touched)
        for key in [key for key in waiting if key in touched]:
            assert waiting.pop(key).finish_reason == "length"
            first.append(now - arrived)
    for s in streams:
        assert s.finish_reason is None, "a stream ended before the prompts"
        engine.end(s, "abort")
    return {
        "gaps": len(gaps),
        "median_ms": 1e3 * median(gaps),
        "p99_ms": 1e3 * percentile(gaps, PERCENTILE),
        "worst_ms": 1e3 * max(gaps),
        "all_prompts_s": max(first),
        "mean_first_token_s": mean(first),
    }


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model's folder or name; left out: --shape with random weights")
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--target", type=int, metavar="MS", help="milliseconds between two tokens")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    options = {"device": args.device, "dtype": "bfloat16", "max_num_seqs": 80, "enable_prefix_caching": False}
    if args.model is None:
        options |= {"model": config(SHAPES[args.shape], 32768), "load_format": "dummy"}
    else:
        options |= {"model": args.model}
    llm = LLM(**options, kv_cache_tokens=2 * args.prompts * args.prompt_tokens // 8 + 200_000)
    engine = llm.engine
    streams, alone_s = begin(engine, 1000)
    for s in streams:
        engine.end(s, "abort")
    target = args.target or math.ceil(4e3 * alone_s)
    found = {"off": measure(engine, args.prompts, args.prompt_tokens, None)}
    found["on"] = measure(engine, args.prompts, args.prompt_tokens, target)
    ratio = found["on"]["p99_ms"] / target
    facts = {"benchmark": "insertion", "bar": BAR, "target_ms": target, "alone_ms": 1e3 * alone_s}
    facts |= {"streams": STREAMS, "prompts": args.prompts, "prompt_tokens": args.prompt_tokens}
    facts |= {"device": llm.device, "threads": torch.get_num_threads(), "machine": platform.machine()}
    facts |= {"p99_over_target": ratio, "met": ratio <= BAR, **found}
    if args.json:
        print(json.dumps(facts, indent=1))
        return
    print(f"{STREAMS} streams, {args.prompts} prompts of {args.prompt_tokens} tokens; target {target} ms")
    print(f"{'':<20} {'off':>10} {'on':>10}")
    for name in found["on"]:
        print(f"{name:<20} {found['off'][name]:10.2f} {found['on'][name]:10.2f}")
    print(f"p99 over the target {ratio:.2f}; bar: at most {BAR}: {'met' if ratio <= BAR else 'NOT met'}")


if __name__ == "__main__":
    main()
