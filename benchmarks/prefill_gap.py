"""How long running streams wait while a long prompt is prefilled, with chunked prefill and without.

    python benchmarks/prefill_gap.py
    python benchmarks/prefill_gap.py --budget 128 --json

Streams decode; a prompt of 4,000 tokens arrives; the worst time between two tokens of a stream is told until the prompt
has its first token. With chunks it is compared with the step time of the token budget: the median of full steps while
a prompt of that length is prefilled alone (the bar is 1.5); later steps are longer, as they look back further, so the
longest is told too. With a budget as large as the prompt it is compared with the whole prefill, again alone. Steps are
the same in every turn; of each the fastest counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from dataclasses import replace
from statistics import median

import torch
from shapes import WIDE, add_clock, clock_name, config

from inferplane import LLM, SamplingParams

BAR = 1.5
STREAMS, PROMPT_TOKENS = 8, 4000


def tokens(count, seed):
    """Random token ids."""
    draw = random.Random(seed)
    return [draw.randrange(WIDE["vocab_size"]) for _ in range(count)]


def add(engine, count, seed, most):
    """A request that will not end before `most` tokens."""
    params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0)
    return engine.add(tokens(count, seed), params, frozenset())


def alone(engine, prompt_tokens, budget, clock):
    """Seconds of each step of a prefill with nothing else to do, and which of them were full."""
    request, spent, full = add(engine, prompt_tokens, 1, 1), [], []
    while request.finish_reason is None:
        begun, before = clock(), request.computed
        engine.step()
        spent.append(clock() - begun)
        full.append(min(before + budget, prompt_tokens) - before == min(budget, prompt_tokens))
    return spent, full


def gaps(engine, prompt_tokens, clock):
    """The worst seconds that a stream waits for each of its tokens, from a prompt's arrival to its first token."""
    streams = [add(engine, 16, 100 + i, prompt_tokens) for i in range(STREAMS)]
    for _ in range(5):
        engine.step()
    last = {id(s): clock() for s in streams}
    request, found = add(engine, prompt_tokens, 2, 1), []
    while request.finish_reason is None:
        touched, now = {id(r) for r in engine.step()}, clock()
        found.append(max(now - last[key] for key in last))  # of those that got no token, how long they wait already
        last.update((key, now) for key in last if key in touched)
    for s in streams:
        engine.end(s, "abort")
    return found


def measure(engine, prompt_tokens, budget, turns, clock):
    """Seconds by step, each the fastest of its turns: what a busy machine adds is never the code's own."""
    limits = engine.scheduler.limits
    ways = {"chunked": budget, "whole": prompt_tokens + STREAMS}
    told = {name: ([], []) for name in ways}
    for _ in range(turns):
        for name, most in ways.items():
            engine.scheduler.limits = replace(limits, max_num_batched_tokens=most)
            spent, full = alone(engine, prompt_tokens, most, clock)
            told[name][0].append(spent)
            told[name][1].append(gaps(engine, prompt_tokens, clock))
            if name == "chunked":
                steps_full = full
    engine.scheduler.limits = limits
    best = {name: [[min(step) for step in zip(*runs)] for runs in both] for name, both in told.items()}
    return {
        "budget_step_s": median(t for t, f in zip(best["chunked"][0], steps_full) if f),
        "prefill_s": sum(best["whole"][0]),
        "chunked_prefill_s": sum(best["chunked"][0]),
        "chunked_gap_s": max(best["chunked"][1]),
        "unchunked_gap_s": max(best["whole"][1]),
        "chunked_gaps_s": best["chunked"][1],
        "chunked_steps_s": best["chunked"][0],
    }


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=256, help="tokens in a step")
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens of the long prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    add_clock(parser)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    shape = config(WIDE, 2 * args.prompt + 64)
    options = {"max_num_seqs": 16, "max_num_batched_tokens": args.prompt + STREAMS, "enable_prefix_caching": False}
    llm = LLM(shape, device=args.device, dtype="bfloat16", load_format="dummy", **options)
    measure(llm.engine, 2 * args.budget, args.budget, 1, args.clock)  # warm
    found = measure(llm.engine, args.prompt, args.budget, args.turns, args.clock)
    over = {
        "gap_over_budget_step": found["chunked_gap_s"] / found["budget_step_s"],
        "gap_over_longest_step": found["chunked_gap_s"] / max(found["chunked_steps_s"]),
        "unchunked_gap_over_prefill": found["unchunked_gap_s"] / found["prefill_s"],
        "unchunked_gap_over_chunked": found["unchunked_gap_s"] / found["chunked_gap_s"],
    }
    told = {"benchmark": "prefill_gap", "bar": BAR, "budget": args.budget, "prompt": args.prompt, "streams": STREAMS}
    told |= {"device": llm.device, "threads": torch.get_num_threads(), "clock": clock_name(args.clock)}
    told |= {"torch": torch.__version__, "machine": platform.machine(), "turns": args.turns, **found, "ratios": over}
    if args.json:
        print(json.dumps(told, indent=1))
        return
    print(f"{STREAMS} streams, a prompt of {args.prompt} tokens, {args.budget} tokens a step; {told['clock']}")
    for name, value in over.items():
        print(f"{name:<28} {value:8.2f}")
    for name in ("budget_step_s", "chunked_gap_s", "unchunked_gap_s", "prefill_s", "chunked_prefill_s"):
        print(f"{name:<28} {found[name]:8.3f}")
    print(f"bar: gap_over_budget_step at most {BAR}")


if __name__ == "__main__":
    main()
