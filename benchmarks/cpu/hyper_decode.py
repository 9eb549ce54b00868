#!/usr/bin/env python3
"""Decode steps of DeepSeek-V4-Flash's layers on the cpu against what reading their weights and cache takes.

    python benchmarks/cpu/hyper_decode.py                                 # 4,096 tokens, 3 layers, 16 experts
    OMP_NUM_THREADS=1 python benchmarks/cpu/hyper_decode.py --cpu-clock   # one thread on a machine that others use

Layers are V4-Flash's from its third on, in int8; of 256 experts there are fewer, of which each token takes 6. Caches
hold random entries; no prompt is read. The vocabulary is small, so that a step is its layers. Bytes are those of the
ops' costs: weights and the cache entries that attention reads. Each turn measures how fast the same threads read
memory, then a step, best of three; a share is that of a turn. Bar: 0.75 of what reading the bytes takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from turns import Probe, bounds, processor

from inferplane.engine import LLM
from inferplane.models.reading.shipped_configs import read_shipped_config
from inferplane.ops.op import Workload
from inferplane.types.batch import Query, make_batch
from inferplane_cpu.huge_pages import wait_for_huge_pages
from inferplane_cpu.native import native

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shapes import add_clock, clock_name

BAR = 0.75
REPEATS = 3
FIRST = 2
"""The layer from which on layers are taken: the last one whose experts a table names; the next one chooses entries."""
BY_LAYER = ("layer_types", "mlp_layer_types")


def config(args):
    """V4-Flash's config with fewer layers, experts and words."""
    found = read_shipped_config("config:deepseek-v4-flash")
    sizes = {key: found[key][FIRST : FIRST + args.layers] for key in BY_LAYER}
    sizes |= {"num_hidden_layers": args.layers, "n_routed_experts": args.experts, "vocab_size": 1024}
    return {**found, **sizes, "max_position_embeddings": args.context, "num_nextn_predict_layers": 0}


def make_step(args):
    """A function that takes a decode step, and the bytes that it reads."""
    llm = LLM(
        config(args), device="cpu", dtype="bfloat16", load_format="dummy", quantization="weight_only_int8",
        max_model_len=args.context, max_num_seqs=1, kv_cache_tokens=args.context,
    )  # fmt: skip
    runner, generator = llm.engine.runner, torch.Generator().manual_seed(0)
    for cache in runner.cache.layers:
        for entries in cache.list_tensors():
            entries.normal_(generator=generator)
    pools, count = runner.cache.list_pools(), -(-args.context // runner.block_tokens)
    tables = [[i % pools[pool] for i in range(count)] for pool in runner.tables.list_pools()]
    query = Query([7], args.context - 1, tables[0], more_blocks=tables[1:])
    batch = make_batch([query], block_tokens=runner.block_tokens, device="cpu")
    wait_for_huge_pages()
    cost = runner.model.cost(Workload(1, args.context, args.context))
    return partial(runner.steps[batch.kind], batch, runner.cache), cost.nbytes


def measure(step, args):
    """Of each turn: bytes a second that are read, and seconds of a step."""
    probe, found = Probe(), []
    for _ in range(args.turns + 1):  # the first warms up
        bandwidth, best = 1e9 * probe(args.clock), float("inf")
        for _ in range(REPEATS):
            start = args.clock()
            step()
            best = min(best, args.clock() - start)
        found.append((bandwidth, best))
    return found[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=16, help="experts of a layer, at least 6")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    add_clock(parser)
    args = parser.parse_args()
    with torch.inference_mode():
        step, nbytes = make_step(args)
        turns = measure(step, args)
    shares = [nbytes / bandwidth / seconds for bandwidth, seconds in turns]
    low, high = bounds(shares)[1]
    bandwidth, seconds = (statistics.median(figures) for figures in zip(*turns, strict=True))
    met = statistics.median(shares) >= BAR
    print(
        f"{1e-6 * nbytes:.0f} MB in {1e3 * seconds:.1f} ms, {1e-9 * bandwidth:.1f} GB/s are read: "
        f"{statistics.median(shares):.2f} of the roof ({low:.2f} to {high:.2f}), "
        f"{'meets' if met else 'MISSES'} {BAR:g} by {clock_name(args.clock)}, {torch.get_num_threads()} threads"
    )
    if args.json:
        facts = {
            "benchmark": "hyper_decode", "context": args.context, "layers": args.layers, "experts": args.experts,
            "threads": torch.get_num_threads(), "clock": clock_name(args.clock), "processor": processor(),
            "native": native().reason, "bar": BAR, "bytes": nbytes, "shares": shares, "turns": turns,
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
