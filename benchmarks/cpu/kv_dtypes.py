#!/usr/bin/env python3
"""Attention's own time at decoding, by the KV cache's dtype, on the cpu backend: that of all layers of Llama-3.2-1B.

    python benchmarks/cpu/kv_dtypes.py                                 # 16,384 tokens of context, two minutes, 2 GB
    OMP_NUM_THREADS=1 python benchmarks/cpu/kv_dtypes.py --cpu-clock   # one thread on a machine that others use
    python benchmarks/cpu/kv_dtypes.py --step                          # whole decode steps, with weights in int4

Caches hold random keys, with channels that tokens share, and random values; no prompt is read. Each turn times every
dtype once, best of three, and the next turn in the reverse order. `faster` is the median over turns of the time with
bfloat16 over this dtype's; `roof` is the ratio of their bytes. Bar: int4 at least 2.5 times faster.

With `--step` a step of the whole model is timed that makes one token, its linear layers in int4 and its head in int8,
over caches that are written as above. Bytes are those of weights and cache; the bar is 0.9 of their roof.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from models import BITS, SHAPES, decode_bytes
from turns import bounds, processor

from inferplane.engine import LLM
from inferplane.ops import Draw
from inferplane.plugin import KVRequest
from inferplane.types.batch import Query, make_batch
from inferplane_cpu.huge_pages import wait_for_huge_pages
from inferplane_cpu.kernels.attention import attention
from inferplane_cpu.kvcache import BLOCK_TOKENS, layouts
from inferplane_cpu.native import native

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shapes import add_clock, clock_name

DTYPES, STEP_DTYPES = ("auto", "fp8", "int8", "k8v4", "int4"), ("auto", "int4")
BAR = 2.5
STEP_SHARE = 0.9
REPEATS = 3
SHAPE = SHAPES["llama-3.2-1b"]
HEADS, KV_HEADS, DIM = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"]


def fill(first, others, slots):
    """Write the same random entries to the slots of each cache."""
    shared = 2 * torch.randn(1, KV_HEADS, DIM)
    keys, values = (torch.randn(len(slots), KV_HEADS, DIM) for _ in range(2))
    first.write(slots, (keys + shared).bfloat16(), values.bfloat16())
    for cache in others:
        for to, of in zip(cache.list_tensors(), first.list_tensors(), strict=True):
            to.copy_(of)


def slots_of(table):
    """The slots of blocks, `[blocks * tokens]`."""
    return (table[:, None].long() * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()


def make_caches(dtype, context, layers):
    """One step of one sequence and each layer's cache, all with the same random entries; and bytes of them all."""
    request, host = KVRequest("gqa", KV_HEADS, DIM, DIM), torch.device("cpu")
    layout = next(layout for layout in layouts(request) if layout.kv_dtype == dtype)
    draw = Draw(0, torch.bfloat16, "cpu", lambda r, blocks: layout.build(r, blocks, torch.bfloat16, host))
    batch, first = draw.step(request, [(1, context)])
    table = batch.block_tables[0][: -(-context // BLOCK_TOKENS)].long()
    caches = [first, *(layout.build(request, first.blocks, torch.bfloat16, host) for _ in range(layers - 1))]
    fill(first, caches[1:], slots_of(table))
    nbytes = sum(t.nbytes for t in first.list_tensors()) * len(table) // first.blocks
    return batch, caches, nbytes * layers


def attention_calls(args):
    """By dtype: a function that attends in all layers, and the bytes that it reads."""
    view = SimpleNamespace(
        heads=HEADS, kv=KVRequest("gqa", KV_HEADS, DIM, DIM), scale=DIM**-0.5, sinks=None, softcap=None
    )
    q = torch.randn(1, HEADS, DIM).bfloat16()

    def attend(batch, caches):
        for cache in caches:
            attention(view, q, batch, cache)

    made = {dtype: make_caches(dtype, args.context, args.layers) for dtype in DTYPES}
    return {dtype: (partial(attend, batch, caches), nbytes) for dtype, (batch, caches, nbytes) in made.items()}


def step_calls(args):
    """By dtype: a function that takes a decode step of the whole model, and the bytes that it reads."""
    sizes = {**SHAPE, "num_hidden_layers": args.layers, "max_position_embeddings": args.context}
    sizes = {k: v for k, v in sizes.items() if k != "kind"}
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
    head = SHAPE["vocab_size"] * SHAPE["hidden_size"] / 8
    linear = (decode_bytes("llama-3.2-1b", "int4") - head * BITS["int4"]) * args.layers / SHAPE["num_hidden_layers"]
    calls = {}
    for dtype in STEP_DTYPES:
        llm = LLM(
            config, device="cpu", dtype="bfloat16", load_format="dummy", quantization="weight_only_int4",
            kv_cache_dtype=dtype, max_model_len=args.context, max_num_seqs=1, kv_cache_tokens=args.context,
        )  # fmt: skip
        runner = llm.engine.runner
        blocks = torch.randperm(-(-args.context // BLOCK_TOKENS))
        fill(runner.cache.layers[0], runner.cache.layers[1:], slots_of(blocks))
        batch = make_batch([Query([7], args.context - 1, blocks.tolist())], block_tokens=BLOCK_TOKENS, device="cpu")
        stored = sum(t[0].nbytes for t in runner.cache.layers[0].list_tensors()) * len(blocks) * args.layers
        calls[dtype] = partial(runner.steps[batch.kind], batch, runner.cache), linear + head * BITS["int8"] + stored
        wait_for_huge_pages()
    return calls


def measure(args):
    """Rows of figures, one a dtype."""
    calls = (step_calls if args.step else attention_calls)(args)
    seconds = {dtype: [] for dtype in calls}
    for turn in range(args.turns + 1):  # the first warms up
        for dtype in list(calls)[:: 1 if turn % 2 else -1]:
            best = float("inf")
            for _ in range(REPEATS):
                start = args.clock()
                calls[dtype][0]()
                best = min(best, args.clock() - start)
            if turn:
                seconds[dtype].append(best)
    rows = []
    for dtype in calls:
        ratios = [plain / own for plain, own in zip(seconds["auto"], seconds[dtype], strict=True)]
        nbytes = calls[dtype][1]
        row = {"kv_dtype": dtype, "bytes": nbytes, "roof": calls["auto"][1] / nbytes, "ms": 1e3 * min(seconds[dtype])}
        row |= {"faster": statistics.median(ratios), "interval_95": bounds(ratios)[1]}
        rows.append({**row, "gb_s": nbytes / min(seconds[dtype]) / 1e9, "turns_ms": [1e3 * s for s in seconds[dtype]]})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--step", action="store_true", help="time whole decode steps")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    add_clock(parser)
    args = parser.parse_args()
    rows = measure(args)
    for row in rows:
        low, high = row["interval_95"]
        print(
            f"{row['kv_dtype']:<5} {row['ms']:8.2f} ms {row['gb_s']:6.1f} GB/s  faster {row['faster']:5.2f} "
            f"({low:.2f} to {high:.2f}), roof {row['roof']:.2f}"
        )
    bar = STEP_SHARE * rows[-1]["roof"] if args.step else BAR
    met = rows[-1]["faster"] >= bar
    print(
        f"int4 {'meets' if met else 'MISSES'} {bar:.2f} by {clock_name(args.clock)}, {torch.get_num_threads()} threads"
    )
    if args.json:
        facts = {
            "benchmark": "kv_dtypes", "context": args.context, "layers": args.layers, "turns": args.turns,
            "threads": torch.get_num_threads(), "clock": clock_name(args.clock), "processor": processor(),
            "native": native().reason, "step": args.step, "bar": bar, "results": rows,
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
