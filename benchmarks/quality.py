#!/usr/bin/env python3
"""What formats and methods cost: perplexity and divergence from the unquantized model on held-out texts, row by row.

    python benchmarks/quality.py --model smollm2-bf16 --texts texts/ --out build/quality
    python benchmarks/quality.py ... --rows a8w8 a8w8+pss --windows 40

Every second file of the texts, by name, is for calibration, the others are held out. A row that `--out` holds already
is not measured again, so that the table can be made in several goes. A row's quantized copy is removed once it is
measured. Beside each row stands the command that makes it.

The model is a folder in bfloat16, such as what `inferplane convert` writes of a GGUF file. Bars are printed with the
table: each is a comparison of two rows, window by window.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROWS = {
    "weight_only_int8": ("weight_only_int8", "", "auto"),
    "weight_only_int4": ("weight_only_int4", "", "auto"),
    "weight_only_int4+clip": ("weight_only_int4", "clip", "auto"),
    "weight_only_int4+awq,clip": ("weight_only_int4", "awq,clip", "auto"),
    "weight_only_int4+gptq": ("weight_only_int4", "gptq", "auto"),
    "weight_only_int4+awq,gptq": ("weight_only_int4", "awq,gptq", "auto"),
    "a8w8": ("a8w8", "", "auto"),
    "a8w8+smoothquant": ("a8w8", "smoothquant", "auto"),
    "a8w8+pss": ("a8w8", "pss", "auto"),
    "a8w8+pss,gptq": ("a8w8", "pss,gptq", "auto"),
    "a8w8_fp8": ("a8w8_fp8", "", "auto"),
    "KV int8": ("", "", "int8"),
    "KV fp8": ("", "", "fp8"),
}
"""Row -> scheme, methods, dtype of the cache."""
BARS = (
    ("a8w8+pss", "a8w8+smoothquant", "divergence below"),
    ("a8w8+smoothquant", "a8w8", "divergence below"),
    ("weight_only_int4+gptq", "weight_only_int4", "at most half of the loss"),
)
RESAMPLES = 2000


def split(texts: Path, out: Path) -> tuple[Path, Path]:
    """Folders with the files to calibrate on and the held-out ones."""
    folders = out / "calibration", out / "held-out"
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(sorted(path for path in texts.rglob("*") if path.is_file())):
        link = folders[number % 2] / f"{number:04}{''.join(path.suffixes)}"
        if not link.exists():
            link.symlink_to(path.resolve())
    return folders


def measure(row: str, args: argparse.Namespace) -> dict:
    """Quantize, evaluate, and return the figures of a row."""
    scheme, methods, cache = ROWS[row]
    calibration, held_out = split(args.texts, args.out)
    verb = [sys.executable, "-m", "inferplane"]
    model, begun, commands = args.model, time.monotonic(), []
    if scheme:
        model = args.out / f"copy-{row}"
        shutil.rmtree(model, ignore_errors=True)
        words = ["quantize", str(args.model), "--quantization", scheme, "--out", str(model)]
        if methods:
            words += ["--data", str(calibration), "--method", methods, "--windows", str(args.calibration_windows)]
        commands.append(words)
        subprocess.run([*verb, *words], check=True, stdout=subprocess.DEVNULL)
    quantized_s = time.monotonic() - begun
    words = ["eval", str(model), "--against", str(args.model), "--data", str(held_out), "--device", args.device]
    words += ["--windows", str(args.windows), "--kv-cache-dtype", cache, "--json"]
    commands.append(words)
    done = subprocess.run([*verb, *words], check=True, stdout=subprocess.PIPE, text=True)
    nbytes = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    if scheme:
        shutil.rmtree(model)
    # The folders' names say nothing to others.
    shown = [" ".join(words).replace(str(args.out), "OUT").replace(str(args.model), "MODEL") for words in commands]
    return {
        "row": row,
        "commands": shown,
        "quantized_s": round(quantized_s, 1),
        "bytes": nbytes,
        **json.loads(done.stdout),
    }


def compare(rows: dict[str, dict], mine: str, other: str) -> tuple[float, float, float]:
    """Mean difference of the divergences of two rows, window by window, with a 95 % interval."""
    pairs = [rows[name]["by_window"] for name in (mine, other)]
    found = [a["divergence"] - b["divergence"] for a, b in zip(*pairs, strict=True)]
    draw = random.Random(0)
    drawn = sorted(statistics.fmean(draw.choices(found, k=len(found))) for _ in range(RESAMPLES))
    return statistics.fmean(found), drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES) - 1]


def table(rows: dict[str, dict]) -> str:
    """The rows as a table in Markdown, and the bars."""
    lines = [
        "| scheme, cache | methods | perplexity | change | divergence, nats a token | same first choice | MB | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        scheme, methods, cache = ROWS[name]
        ratio, kl = row["ratio"], row["divergence"]
        change = (
            f"{100 * ratio['value'] - 100:+.2f} % ({100 * ratio['low'] - 100:+.2f} to {100 * ratio['high'] - 100:+.2f})"
        )
        what = f"`{scheme}`" if scheme else f"KV cache in {cache}"
        cells = what, methods or "-", f"{row['perplexity']['value']:.2f}", change
        cells += f"{kl['value']:.4f} ({kl['low']:.4f} to {kl['high']:.4f})", f"{row['agreement']['value']:.3f}"
        cells += f"{row['bytes'] / 1e6:.0f}", f"{row['quantized_s']:.0f}"
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for mine, other, bar in BARS:
        if mine not in rows or other not in rows:
            continue
        mean, low, high = compare(rows, mine, other)
        loss = (rows[mine]["ratio"]["value"] - 1) / (rows[other]["ratio"]["value"] - 1)
        met = high < 0 if bar == "divergence below" else loss <= 0.5
        figures = f"divergence {mean:+.5f} ({low:+.5f} to {high:+.5f}), loss of perplexity x {loss:.2f}"
        lines.append(f"- {mine} against {other}: {figures}; bar: {bar}: {'met' if met else 'NOT met'}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder in bfloat16")
    parser.add_argument("--texts", type=Path, required=True, help="a folder of texts")
    parser.add_argument("--out", type=Path, required=True, help="a folder for what is measured")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--windows", type=int, default=200, help="held-out windows of 512 tokens")
    parser.add_argument("--calibration-windows", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    rows = {}
    for row in args.rows:
        path = args.out / f"{row.replace(',', '+')}.json"
        if not path.is_file():
            found = {
                "date": str(date.today()),
                "machine": platform.processor() or platform.machine(),
                **measure(row, args),
            }
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        rows[row] = json.loads(path.read_text(encoding="utf-8"))
        print(f"{row}: {rows[row]['divergence']}", file=sys.stderr)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
