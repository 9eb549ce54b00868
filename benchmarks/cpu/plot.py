#!/usr/bin/env python3
"""Draws results of `turns.py`: a panel for each test, a bar for each peer and precision, the spread of its turns.

    pip install matplotlib
    python benchmarks/cpu/plot.py results/2026-11-21-qwen3-0.6b-decode.json --svg docs/images/cpu-qwen3-0.6b-amx.svg

In decoding of one sequence a tick shows where the measured bandwidth would be used up.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

COLOURS = {"inferplane": "#0b7a5c", "openvino": "#5b6ee1", "llama.cpp": "#d98324", "transformers": "#888888"}


def title(test):
    verb, *numbers = test.split()
    if verb == "prefill":
        return f"prefill of {numbers[0]} tokens"
    batch = f"{numbers[2]} sequences" if numbers[2:3] not in ([], ["1"]) else "one sequence"
    cache = f", inferplane's KV cache in {numbers[3]}" if numbers[3:] else ""
    return f"decoding, {batch}, {numbers[0]} tokens of context{cache}"


def panel(axes, test, by_peer):
    """One test: bars from the top in the order of the file."""
    for at, (name, r) in enumerate(by_peer.items()):
        engine = name.partition(":")[0]
        low, high = r["spread"]
        middle = r["tokens_per_s"]
        axes.barh(at, middle, color=COLOURS[engine], height=0.7)
        axes.plot([low, high], [at, at], color="black", linewidth=0.8)
        axes.annotate(f" {middle:,.0f}" if middle >= 100 else f" {middle:.1f}", (max(high, middle), at), va="center")
        if "bandwidth" in r:
            roof = middle / r["bandwidth"]
            axes.plot([roof, roof], [at - 0.45, at + 0.45], color="crimson", linewidth=1.2)
    axes.set_yticks(range(len(by_peer)), by_peer)
    axes.invert_yaxis()
    axes.set_title(title(test), loc="left", fontsize="medium")
    axes.set_xlabel("tokens/s")
    axes.margins(x=0.14)
    axes.spines[["top", "right"]].set_visible(False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of turns.py, all of one shape")
    parser.add_argument("--svg", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    reports = [json.loads(file.read_text()) for file in args.results]
    if len({r["shape"] for r in reports}) > 1:
        raise SystemExit(f"of one shape, please: these hold {sorted({r['shape'] for r in reports})}")
    tests = [(test, by_peer) for r in reports for test, by_peer in r["results"].items()]
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "0", "font.family": "sans-serif", "font.size": 9}
    heights = [len(by_peer) + 1.6 for _, by_peer in tests]
    figure, axes = pyplot.subplots(
        len(tests), 1, figsize=(7.5, 0.26 * sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for one, (test, by_peer) in zip(axes[:, 0], tests, strict=True):
        panel(one, test, by_peer)
    args.svg.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.svg, metadata={"Date": None, "Title": f"{reports[0]['shape']} on the cpu backend"})


if __name__ == "__main__":
    main()
