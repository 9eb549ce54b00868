"""How long running streams wait while a long prompt is prefilled, with chunked prefill and without.

    python benchmarks/prefill_gap.py
    python benchmarks/prefill_gap.py --budget 128 --json

Streams decode; a prompt of 4,000 tokens arrives; the worst time between two tokens of a stream is told until the prompt
has its first token. With chunks it is compared with the step time of the token budget: the median of full steps while
the same prompt is prefilled alone (the bar is 1.5). With a budget as large as the prompt it is compared with the whole
prefill, again alone. Every turn measures all of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from statistics import median

import torch
from shapes import TINY, add_clock, clock_name, config

from inferplane import LLM, SamplingParams

BAR = 1.5
STREAMS, PROMPT_TOKENS = 8, 4000


def tokens(count, seed):
    """Random token ids."""
    draw = random.Random(seed)
    return [draw.randrange(TINY["vocab_size"]) for _ in range(count)]


def add(engine, count, seed, most):
    """A request that will not end before `most` tokens."""
    params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0)
    return engine.add(tokens(count, seed), params, frozenset())


def alone(engine, prompt_tokens, budget, clock):
    """Seconds of a prefill's full steps, and of the whole of it, with nothing else to do."""
    request, steps = add(engine, prompt_tokens, 1, 1), []
    while request.finish_reason is None:
        begun, before = clock(), request.computed
        engine.step()
        steps.append((clock() - begun, (request.computed or prompt_tokens) - before))
    return [spent for spent, count in steps if count == min(budget, prompt_tokens)], sum(spent for spent, _ in steps)


def worst_gap(engine, prompt_tokens, clock):
    """The worst seconds between two tokens of a stream from the prompt's arrival to its first token."""
    streams = [add(engine, 16, 100 + i, prompt_tokens) for i in range(STREAMS)]
    for _ in range(5):
        engine.step()
    last = {id(s): clock() for s in streams}
    request, worst = add(engine, prompt_tokens, 2, 1), 0.0
    while request.finish_reason is None:
        touched = engine.step()
        now = clock()
        for s in touched:
            if id(s) in last:
                worst, last[id(s)] = max(worst, now - last[id(s)]), now
    waited = max(clock() - at for at in last.values())
    for s in streams:
        engine.end(s, "abort")
    return max(worst, waited)


def turn(engine, prompt_tokens, budget, clock):
    """One turn: chunks, then none."""
    limits = engine.scheduler.limits
    found = {}
    for name, most in (("chunked", budget), ("whole", prompt_tokens + STREAMS)):
        engine.scheduler.limits = type(limits)(**{**vars(limits), "max_step_tokens": most})
        full, whole = alone(engine, prompt_tokens, most, clock)
        gap = worst_gap(engine, prompt_tokens, clock)
        found[name] = {"gap_s": gap, "step_s": median(full), "prefill_s": whole}
    engine.scheduler.limits = limits
    return found


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
    shape = config(TINY, 2 * args.prompt + 64)
    llm = LLM(shape, device=args.device, dtype="bfloat16", load_format="dummy", max_batch=16, prefix_cache=False)
    turn(llm.engine, args.budget * 2, args.budget, args.clock)  # warm
    turns = [turn(llm.engine, args.prompt, args.budget, args.clock) for _ in range(args.turns)]
    over = {
        "gap_over_budget_step": [t["chunked"]["gap_s"] / t["chunked"]["step_s"] for t in turns],
        "unchunked_gap_over_prefill": [t["whole"]["gap_s"] / t["whole"]["prefill_s"] for t in turns],
        "unchunked_gap_over_chunked": [t["whole"]["gap_s"] / t["chunked"]["gap_s"] for t in turns],
    }
    told = {"benchmark": "prefill_gap", "bar": BAR, "budget": args.budget, "prompt": args.prompt, "streams": STREAMS}
    told |= {
        "device": llm.device,
        "threads": torch.get_num_threads(),
        "clock": clock_name(args.clock),
        "torch": torch.__version__,
    }
    told |= {"machine": platform.machine(), "turns": turns, "ratios": over}
    if args.json:
        print(json.dumps(told, indent=1))
        return
    print(f"{STREAMS} streams, a prompt of {args.prompt} tokens, {args.turns} turns: median (min to max)")
    for name, values in over.items():
        print(f"{name:<28} {median(values):7.2f} ({min(values):.2f} to {max(values):.2f})")
    for name, part in (("worst gap, chunked", "chunked"), ("worst gap, unchunked", "whole")):
        print(f"{name:<28} {1e3 * median(t[part]['gap_s'] for t in turns):7.0f} ms")
    print(f"step of {args.budget} tokens{'':<10} {1e3 * median(t['chunked']['step_s'] for t in turns):7.0f} ms")
    print(f"bar: gap_over_budget_step at most {BAR}")


if __name__ == "__main__":
    main()
