#!/usr/bin/env python3
"""A start from an exported folder beside one that quantizes the checkpoint: seconds from `LLM(...)` to the first token.

    python benchmarks/cpu/exported.py --shape llama-3.2-1b --turns 5      # 3.5 GB of disk

Each turn starts both in new processes that have imported all they need, one after the other, with the files in the page
cache. Bar: the exported start is at least 2 x faster. The greedy tokens of both must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from models import add_arguments, checkpoint

BAR = 2.0
START = """
import json, sys, time
from inferplane import LLM, SamplingParams
model, options = sys.argv[1], json.loads(sys.argv[2])
with LLM("demo", device="cpu", kv_cache_bytes=2**24) as warm:  # imports what a start needs
    warm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0))
start = time.perf_counter()
llm = LLM(model, device="cpu", kv_cache_bytes=64 * 2**20, **options)
loaded = time.perf_counter()
tokens = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0))[0].token_ids
end = time.perf_counter()
tokens += llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))[0].token_ids
spent = {name: round(seconds, 3) for name, seconds in llm.runner.spent_s.items()}
print(json.dumps({"load_s": loaded - start, "first_token_s": end - start, "tokens": tokens, "spent_s": spent}))
"""


def start(model, **options):
    """One start in a new process."""
    words = [sys.executable, "-c", START, str(model), json.dumps(options)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "llama-3.2-1b", turns=5)
    parser.add_argument("--quantization", default="weight_only_int4")
    args = parser.parse_args()
    options = {"dtype": "bfloat16", "quantization": args.quantization}
    with checkpoint(args) as folder:
        made = folder.with_name(f"{folder.name}-{args.quantization}")
        if not made.exists():
            words = ["export", str(folder), "--out", str(made), "--device", "cpu"]
            flags = [word for name, value in options.items() for word in (f"--{name}", value)]
            subprocess.run([sys.executable, "-m", "inferplane", *words, *flags], check=True)
        found = {"quantized": [], "exported": []}
        for turn in range(args.turns):
            for name in ("quantized", "exported") if turn % 2 else ("exported", "quantized"):
                found[name].append(start(made) if name == "exported" else start(folder, **options))
                print(name, {k: v for k, v in found[name][-1].items() if k != "tokens"}, flush=True)
        nbytes = json.loads((made / "export.json").read_text())["rank_bytes"]
    same = len({tuple(run["tokens"]) for runs in found.values() for run in runs}) == 1
    result = {"shape": args.shape, "quantization": args.quantization, "rank_bytes": nbytes, "equal_tokens": same}
    for what in ("load_s", "first_token_s"):
        middle = {name: statistics.median(run[what] for run in runs) for name, runs in found.items()}
        result[what] = {**middle, "ratio": middle["quantized"] / middle["exported"]}
    print(json.dumps(result, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps({**result, "runs": found}, indent=1) + "\n")
    return 0 if same and result["first_token_s"]["ratio"] >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
