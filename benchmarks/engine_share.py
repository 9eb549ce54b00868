"""How much of a step is the engine's own: scheduling, building the batch, sampling, accepting. All but the model.

    python benchmarks/engine_share.py                      # Qwen3-0.6B's sizes, random weights, bfloat16
    python benchmarks/engine_share.py --batch 32 --json

The model's time is that of `Runner.run`, which ends with the logits. Steps decode; each case's share is the median over
its steps. The bar is 5 %. Random weights give flat logits, which are the dearest for top-p.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from itertools import product
from statistics import median

import torch
from shapes import QWEN3_0_6B, add_clock, clock_name, config

from inferplane import LLM, SamplingParams

BAR = 0.05
PROMPT_TOKENS = 32
ASKED = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
}


def measure(llm, batch, words, steps, clock):
    """Milliseconds of the median step, model and engine, and the engine's median share."""
    engine, draw, spent = llm.engine, random.Random(0), []
    run = engine.runner.run

    def timed(step):
        begun = clock()
        result = run(step)
        spent.append(clock() - begun)
        return result

    params = SamplingParams(max_tokens=steps + 4, ignore_eos=True, seed=1, **ASKED[words])
    prompts = [[draw.randrange(engine.vocab) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    requests = [engine.add(prompt, params, frozenset()) for prompt in prompts]
    engine.runner.run = timed
    try:
        engine.step()
        engine.step()
        spent.clear()
        whole = []
        for _ in range(steps):
            begun = clock()
            engine.step()
            whole.append(clock() - begun)
    finally:
        engine.runner.run = run
        for request in requests:
            engine.end(request, "abort")
    assert len(spent) == len(whole), "a step ran the model more than once"
    own = [a - b for a, b in zip(whole, spent)]
    return {
        "batch": batch,
        "asked": words,
        "step_ms": 1e3 * median(whole),
        "model_ms": 1e3 * median(spent),
        "engine_ms": 1e3 * median(own),
        "engine_best_ms": 1e3 * min(own),
        "share": median(a / b for a, b in zip(own, whole)),
    }


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="sequences in a step")
    parser.add_argument("--asked", nargs="+", choices=list(ASKED), default=list(ASKED), help="how tokens are chosen")
    parser.add_argument("--steps", type=int, default=20, help="steps of each case")
    parser.add_argument("--device", default="cpu")
    add_clock(parser)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    llm = LLM(
        config(QWEN3_0_6B, 256), device=args.device, dtype="bfloat16", load_format="dummy", enable_prefix_caching=False
    )
    if not args.json:
        print(f"{'batch':>5} {'asked':<12} {'step ms':>8} {'model ms':>9} {'engine ms':>10} {'best':>7} {'share':>7}")
    results = []
    for batch, words in product(args.batch, args.asked):
        results.append(r := measure(llm, batch, words, args.steps, args.clock))
        if not args.json:
            times = f"{r['step_ms']:8.1f} {r['model_ms']:9.1f} {r['engine_ms']:10.2f} {r['engine_best_ms']:7.2f}"
            print(f"{r['batch']:>5} {r['asked']:<12} {times} {r['share']:7.2%}", flush=True)
    told = {
        "benchmark": "engine_share",
        "bar": BAR,
        "device": llm.device,
        "threads": torch.get_num_threads(),
        "clock": clock_name(args.clock),
    }
    told |= {"torch": torch.__version__, "machine": platform.machine(), "results": results}
    if args.json:
        print(json.dumps(told, indent=1))
        return
    print(f"bar: {BAR:.0%}")


if __name__ == "__main__":
    main()
