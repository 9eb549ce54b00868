#!/usr/bin/env python3
"""Writes the page of the cpu backend's results and its plots anew from the JSON files that `turns.py` left.

    pip install matplotlib
    python benchmarks/cpu/page.py             # docs/benchmarks-cpu.md and docs/images/cpu-SHAPE-INSTRUCTIONS.svg
    python benchmarks/cpu/page.py --no-plots  # the page alone

Of each shape, instruction set and test the newest file counts: names begin with the date.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent.parent / "docs"
INTRODUCTION = """# Results of the cpu backend

Written by `python benchmarks/cpu/page.py` from `benchmarks/cpu/results/`; [benchmarks](benchmarks.md#the-cpu-backend)
has what they mean. Tokens a second are medians over turns with the spread; `faster` is the median over turns of
Inferplane's speed over this engine's, in the same precision, and in brackets the lower 95 % bound of the mean.
"""


SHAPES = {
    "qwen3-0.6b": "Qwen3-0.6B",
    "llama-3.2-1b": "Llama-3.2-1B",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "gemma-3-1b": "Gemma-3-1B",
    "gpt-oss-20b": "gpt-oss-20b, 6 layers with 12 experts in MXFP4",
    "qwen3.5-0.8b": "Qwen3.5-0.8B",
    "smollm2": "SmolLM2-135M-Instruct, the published GGUF file in Q4_1",
    "gemma3-270m": "Gemma 3 270M, the published GGUF file in Q4_K_M",
    "llama1b-q8_0": "Llama-3.2-1B's sizes, a GGUF file in Q8_0",
    "llama1b-q4_k_m": "Llama-3.2-1B's sizes, a GGUF file in Q4_K_M",
}
SETS = {
    "amx": "AMX",
    "avx2": "AVX2",
    "avx512_bf16": "AVX-512 BF16 (Zen 4)",
    "avx512_bf16-zen5": "AVX-512 BF16 (Zen 5)",
}
ZEN_5 = "vendor AuthenticAMD family 26"


def instructions(report):
    """The instruction set that a machine's native kernels used: "native kernels on amx (of ...)".

    Zen 5 has Zen 4's and other figures. Reports in which no processor is written down are of Zen 4 where they could be.
    """
    return report["native"].split()[3] + ("-zen5" if report.get("processor", "").startswith(ZEN_5) else "")


def newest(folder):
    """`{(shape, instruction set): {test: (file, report, results)}}`, of the last day, its file with most turns."""
    found = {}
    reports = [(file, json.loads(file.read_text())) for file in folder.glob("*.json")]
    for file, report in sorted(reports, key=lambda x: (x[0].name[:10], x[1]["turns"], x[0].name)):
        for test, results in report["results"].items():
            name = f"{test} 1" if test.startswith("decode") and test.count(" ") == 2 else test  # one sequence
            name = f"{name} {report['kv_dtype']}" if report.get("kv_dtype", "auto") != "auto" else name
            found.setdefault((report["shape"], instructions(report)), {})[name] = (file, report, results)
    return found


def title(test):
    """`decode CONTEXT TOKENS SEQUENCES [KV-DTYPE]` or `prefill TOKENS` in words."""
    kind, tokens, *more = test.split()
    if kind != "decode":
        return f"Prefill of {int(tokens):,} tokens"
    sequences = "one sequence" if more[1] == "1" else f"{more[1]} sequences"
    cache = f", Inferplane's KV cache in {more[2]}" if len(more) > 2 else ""
    return f"Decoding, {sequences}, {int(tokens):,} tokens of context{cache}"


def order(test):
    """Decoding first; few sequences and few tokens first."""
    kind, tokens, *more = test.split()
    return kind, int(more[1]) if more else 0, int(tokens), len(more)


def row(name, r):
    low, high = r["spread"]
    share = f"{r['bandwidth']:.2f}" if "bandwidth" in r else ""
    ours = name.startswith("inferplane")
    faster = "" if ours or "at_least" not in r else f"{r['inferplane_is_faster_by']:.2f} ({r['at_least']:.2f})"
    speed = f"{r['tokens_per_s']:,.1f} ({low:,.1f} to {high:,.1f})"
    return f"| {name} | {speed} | {share} | {faster} | {r['probe_gb_s']:.1f} |"


def section(test, file, report, results):
    loads = " and ".join(f"{x[0]:.1f}" for x in report["load_before_and_after"])
    yield f"### {title(test)}"
    yield ""
    yield f"`{file.name}`: {report['turns']} turns, {report['threads']} threads, {report['native']}; load {loads}."
    yield ""
    yield "| | tokens/s | share of bandwidth | faster | probe, GB/s |"
    yield "|---|---|---|---|---|"
    yield from (row(name, r) for name, r in results.items())
    yield ""


def page(found):
    lines = [INTRODUCTION]
    for (shape, isa), tests in sorted(found.items()):
        image = f"![{shape}: tokens a second of each engine](images/cpu-{shape}-{isa}.svg)"
        lines += [f"## {SHAPES.get(shape, shape)}, {SETS.get(isa, isa)}", "", image, ""]
        for test, of in sorted(tests.items(), key=lambda x: order(x[0])):
            lines += section(test, *of)
    return "\n".join(lines).rstrip() + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="FOLDER")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="FOLDER")
    parser.add_argument("--no-plots", action="store_true")
    args = parser.parse_args()
    found = newest(args.results)
    (args.docs / "benchmarks-cpu.md").write_text(page(found))
    for (shape, isa), tests in {} if args.no_plots else found.items():
        with tempfile.NamedTemporaryFile("w", suffix=".json") as chosen:
            json.dump({"shape": shape, "results": {test: of[2] for test, of in sorted(tests.items())}}, chosen)
            chosen.flush()
            svg = str(args.docs / f"images/cpu-{shape}-{isa}.svg")
            subprocess.run([sys.executable, str(HERE / "plot.py"), chosen.name, "--svg", svg], check=True)


if __name__ == "__main__":
    main()
