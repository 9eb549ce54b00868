#!/usr/bin/env python3
"""Decode steps with sparse attention against the dense form, on the cpu: DeepSeek-V3.2's layers at a long context.

    python benchmarks/cpu/sparse_decode.py                                 # 32,768 tokens, 3 layers, 3 GB
    OMP_NUM_THREADS=1 python benchmarks/cpu/sparse_decode.py --cpu-clock   # one thread on a machine that others use

Both models have the same sizes, 128 heads and 16 experts of which each token takes 8, in int8; the sparse one has 64
index heads and reads 2,048 tokens. Caches hold random entries; no prompt is read. The vocabulary is small, so that a
step is its layers. Each turn times both, best of three, the next turn in the reverse order; a ratio is that of a turn.
Bar: 3 times the dense form's tokens a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from turns import bounds, processor

from inferplane.engine import LLM
from inferplane.types.batch import Query, make_batch
from inferplane_cpu.huge_pages import wait_for_huge_pages
from inferplane_cpu.kvcache import BLOCK_TOKENS
from inferplane_cpu.native import native

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shapes import REAL, add_clock, clock_name

BAR = 3.0
REPEATS = 3
PIECE = 4096
INDEX = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
FORMS = {"dense": ("DeepseekV3ForCausalLM", "deepseek_v3"), "sparse": ("DeepseekV32ForCausalLM", "deepseek_v32")}


def config(form, args):
    """The model's config; both forms have the same sizes."""
    architecture, model_type = FORMS[form]
    sizes = {**REAL["DeepSeek-V3, 4 layers"], "num_hidden_layers": args.layers, "first_k_dense_replace": 0}
    sizes |= {"n_routed_experts": 16, "n_group": 4, "topk_group": 4, "vocab_size": 1024, "hidden_size": args.hidden}
    sizes |= {"moe_intermediate_size": args.expert, "max_position_embeddings": args.context}
    own = INDEX if form == "sparse" else {}
    return {**sizes, **own, "architectures": [architecture], "model_type": model_type}


def fill(caches, blocks, generator):
    """Write random entries to the slots of some blocks, in pieces."""
    slots = (blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()
    for cache in caches:
        for piece in slots.split(PIECE):
            shapes = cache.request.entry_shapes
            cache.write(piece, *(torch.randn(len(piece), *s, generator=generator).bfloat16() for s in shapes))


def make_step(form, args):
    """A function that takes a decode step."""
    llm = LLM(
        config(form, args), device="cpu", dtype="bfloat16", load_format="dummy", quantization="weight_only_int8",
        max_model_len=args.context, max_num_seqs=1, kv_cache_tokens=args.context,
    )  # fmt: skip
    runner, generator = llm.engine.runner, torch.Generator().manual_seed(0)
    blocks = torch.randperm(-(-args.context // BLOCK_TOKENS), generator=generator)
    fill(runner.cache.layers, blocks, generator)
    batch = make_batch([Query([7], args.context - 1, blocks.tolist())], block_tokens=BLOCK_TOKENS, device="cpu")
    wait_for_huge_pages()
    return partial(runner.steps[batch.kind], batch, runner.cache)


def measure(steps, args):
    """Form -> seconds of each turn."""
    seconds = {form: [] for form in steps}
    for turn in range(args.turns + 1):  # the first warms up
        for form in list(steps)[:: 1 if turn % 2 else -1]:
            best = float("inf")
            for _ in range(REPEATS):
                start = args.clock()
                steps[form]()
                best = min(best, args.clock() - start)
            if turn:
                seconds[form].append(best)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=7168, help="hidden size")
    parser.add_argument("--expert", type=int, default=2048, help="intermediate size of an expert")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    add_clock(parser)
    args = parser.parse_args()
    with torch.inference_mode():
        seconds = measure({form: make_step(form, args) for form in FORMS}, args)
    ratios = [dense / sparse for dense, sparse in zip(*seconds.values(), strict=True)]
    low, high = bounds(ratios)[1]
    times = ", ".join(f"{form} {1e3 * statistics.median(found):.1f} ms" for form, found in seconds.items())
    met = statistics.median(ratios) >= BAR
    print(
        f"{times}; sparse is {statistics.median(ratios):.2f} times as fast ({low:.2f} to {high:.2f}): "
        f"{'meets' if met else 'MISSES'} {BAR:g} by {clock_name(args.clock)}, {torch.get_num_threads()} threads"
    )
    if args.json:
        facts = {
            "benchmark": "sparse_decode", "context": args.context, "layers": args.layers, "hidden": args.hidden,
            "expert": args.expert, "threads": torch.get_num_threads(), "clock": clock_name(args.clock),
            "processor": processor(), "native": native().reason, "bar": BAR, "ratios": ratios, "seconds": seconds,
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
