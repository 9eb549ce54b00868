#!/usr/bin/env python3
"""What formats and methods cost: perplexity and divergence from the unquantized model on held-out texts, row by row.

    python benchmarks/quality.py --model smollm2-bf16 --texts texts/ --out build/quality
    python benchmarks/quality.py ... --rows a8w8 a8w8+pss --windows 40
    python benchmarks/quality.py ... --base rotated --peer build/peer/bin/python

Every second file of the texts, by name, is for calibration, the others are held out. A row that `--out` holds already
is not measured again, so that the table can be made in several goes. A row's quantized copy is removed once it is
measured. Beside each row stands the command that makes it.

The model is a folder in bfloat16, such as what `inferplane convert` writes of a GGUF file. With `--base rotated` its
residual stream is rotated first, so that no grid of the file's own format fits its weights; with `--base planted` one
channel in a hundred is made 50 times as large where a norm writes it, and its readers' columns as much smaller, which
changes no result. Rows of llm-compressor are made by `benchmarks/quality_peer.py` with the interpreter of `--peer`, on
the same windows. Bars are printed with the table: each is a comparison of two rows, window by window.
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
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """What is measured.

    Args:
        scheme: of weights; empty: they stay. methods: of calibration. cache: dtype of the KV cache.
        group: columns of int4 weights that share a scale; 0: the scheme's.
        online: quantized while loading, without a copy.
        peer: method of llm-compressor, in place of our own.
    """

    scheme: str = ""
    methods: str = ""
    cache: str = "auto"
    group: int = 0
    online: bool = False
    peer: str = ""

    @property
    def what(self) -> str:
        """Scheme and groups, or the cache's dtype, as the table has it."""
        if not self.scheme:
            return f"KV cache in {self.cache}"
        return f"`{self.scheme}`" + (f", groups of {self.group}" if self.group else "")

    @property
    def how(self) -> str:
        """Methods, as the table has them."""
        if self.peer:
            return f"llm-compressor's {self.peer}"
        return "while loading" if self.online else self.methods or "-"


INT4 = "weight_only_int4"
ROWS = {
    "weight_only_int8": Row("weight_only_int8"),
    "int4": Row(INT4),
    "int4 online": Row(INT4, online=True),
    "int4+clip": Row(INT4, "clip"),
    "int4+gptq": Row(INT4, "gptq"),
    "int4+quantease": Row(INT4, "quantease"),
    "int4+awq+gptq": Row(INT4, "awq,gptq"),
    "int4+awq+quantease": Row(INT4, "awq,quantease"),
    "int4+rotate+gptq": Row(INT4, "rotate,gptq"),
    **{
        f"int4 g{group}{'+' * bool(methods)}{methods.replace(',', '+')}": Row(INT4, methods, group=group)
        for group in (64, 128)
        for methods in ("", "gptq", "awq,gptq", "quantease", "awq,quantease")
    },
    **{
        f"int4 g{group} peer {peer}": Row(INT4, peer=peer, group=group)
        for group in (64, 128)
        for peer in ("gptq", "awq")
    },
    **{
        f"{format}{'+' * bool(methods)}{methods}": Row(f"weight_only_{format}", methods)
        for format in ("nvfp4", "mxfp4")
        for methods in ("", "clip", "gptq", "quantease")
    },
    "a8w8": Row("a8w8"),
    "a8w8+smoothquant": Row("a8w8", "smoothquant"),
    "a8w8+pss": Row("a8w8", "pss"),
    "a8w8+pss+gptq": Row("a8w8", "pss,gptq"),
    "a8w8+pss+quantease": Row("a8w8", "pss,quantease"),
    "a8w8+rotate": Row("a8w8", "rotate,nearest"),
    "a8w8_fp8": Row("a8w8_fp8"),
    "a8w4": Row("a8w4"),
    "a8w4+gptq": Row("a8w4", "gptq"),
    **{
        f"{scheme}{'+' * bool(methods)}{methods.replace(',', '+')}": Row(scheme, methods)
        for scheme in ("a4w4", "a4w4_mxfp4")
        for methods in ("", "gptq", "rotate,nearest", "rotate,gptq")
    },
    "KV int8": Row(cache="int8"),
    "KV fp8": Row(cache="fp8"),
    "KV int4": Row(cache="int4"),
    "KV k8v4": Row(cache="k8v4"),
}
BELOW, HALF, THIRD = "divergence below", "at most half of the loss", "at most a third of the loss"
SHARES = {HALF: 1 / 2, THIRD: 1 / 3}
BARS = (
    ("a8w8+pss", "a8w8+smoothquant", BELOW),
    ("a8w8+smoothquant", "a8w8", BELOW),
    ("int4+gptq", "int4", HALF),
    *((f"a4w4+rotate+{rounding}", "a4w4", THIRD) for rounding in ("nearest", "gptq")),
    *((f"{format}+gptq", format, HALF) for format in ("nvfp4", "mxfp4")),
    *((f"int4 g{group}+awq+gptq", f"int4 g{group}", HALF) for group in (64, 128)),
    *(
        (f"int4 g{group}+awq+gptq", f"int4 g{group} peer {peer}", BELOW)
        for group in (64, 128)
        for peer in ("gptq", "awq")
    ),
)
LIMITS = {"weight_only_int8": 0.2, "a8w8+pss": 0.5, "KV int8": 0.3, "KV int4": 3.0, "KV k8v4": 0.6}
"""Row -> most percent of perplexity that it may cost."""
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


def make_base(args: argparse.Namespace) -> Path:
    """The folder of the model that rows are measured on."""
    if args.base == "plain":
        return args.model
    folder = args.out / f"base-{args.base}"
    if not folder.is_dir():
        made = folder.with_suffix(".partial")
        shutil.rmtree(made, ignore_errors=True)
        (write_rotated if args.base == "rotated" else write_planted)(args.model, made)
        made.rename(folder)
    return folder


def write_rotated(model: Path, folder: Path) -> None:
    """Write a model with a rotated residual stream, seed 0, in bfloat16."""
    from inferplane.calibrate import rotate
    from inferplane.engine import ModelFiles
    from inferplane.models.writing.model_to_quantize import ModelToQuantize

    files = ModelFiles(model)
    ids = [i % int(files.config["vocab_size"]) for i in range(7, 7 * 65, 7)]
    found = rotate(ModelToQuantize(str(model), files.config_of_tensors(), files.source()), ids)
    names = [name for name in found.source.names() if found.source.shape(name) is not None]
    write_copy(model, folder, {name: read(found.source, name) for name in names}, found.changes)


def write_planted(model: Path, folder: Path) -> None:
    """Write a model one in a hundred of whose channels is 50 times as large between norms and what reads them."""
    import torch
    from safetensors.torch import load_file

    tensors = {}
    for path in model.glob("*.safetensors"):
        tensors.update(load_file(path))
    readers = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
    for name in [name for name in tensors if name.endswith("_layernorm.weight")]:
        prefix, norm = name.rsplit(".", 2)[0], name.split(".")[-2]
        if norm not in readers:
            continue
        width = len(tensors[name])
        chosen = torch.randperm(width, generator=torch.Generator().manual_seed(len(name)))[: max(1, width // 100)]
        tensors[name][chosen] *= 50
        for module, value in tensors.items():
            if module.startswith(prefix + ".") and module.split(".")[-2] in readers[norm]:
                value[:, chosen] /= 50
    write_copy(model, folder, tensors, {})


def read(source: Any, name: str) -> Any:
    """A tensor in float32."""
    import torch

    from inferplane.types import Shard

    out = torch.empty(source.shape(name), dtype=torch.float32)
    source.read_into(name, out, Shard())
    return out


def write_copy(model: Path, folder: Path, tensors: dict, changes: Any) -> None:
    """Write tensors in bfloat16 with the other files of a model, and some changed entries of its config."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    config = {**json.loads((model / "config.json").read_text(encoding="utf-8")), **changes}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({name: value.bfloat16().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")


def write_windows(model: Path, calibration: Path, count: int, path: Path) -> None:
    """Write the token ids of the windows that our own methods are calibrated on."""
    from inferplane.calibrate import draw_windows, read_texts, slice_windows
    from inferplane.engine.request.text import Tokenizer

    windows = slice_windows(read_texts([calibration]), Tokenizer(model).encode, 512)
    path.write_text(json.dumps([window.ids for window in draw_windows(windows, count, 0)]), encoding="utf-8")


def measure(name: str, base: Path, args: argparse.Namespace) -> dict:
    """Quantize, evaluate, and return the figures of a row."""
    row = ROWS[name]
    calibration, held_out = split(args.texts, args.out)
    verb = [sys.executable, "-m", "inferplane"]
    model, begun, commands = base, time.monotonic(), []
    is_copy = bool(row.scheme) and not row.online
    if is_copy:
        model = args.out / f"copy-{name.replace(' ', '-')}"
        shutil.rmtree(model, ignore_errors=True)
        if row.peer:
            windows = args.out / f"windows-{args.base}.json"
            write_windows(base, calibration, args.calibration_windows, windows)
            words = [str(Path(__file__).with_name("quality_peer.py")), "--model", str(base), "--windows", str(windows)]
            words += ["--method", row.peer, "--group", str(row.group), "--out", str(model)]
            subprocess.run([args.peer, *words], check=True, stdout=subprocess.DEVNULL)
        else:
            words = ["quantize", str(base), "--quantization", row.scheme, "--out", str(model)]
            words += ["--group-size", str(row.group)] if row.group else []
            if row.methods:
                words += ["--data", str(calibration), "--method", row.methods]
                words += ["--windows", str(args.calibration_windows)]
            subprocess.run([*verb, *words], check=True, stdout=subprocess.DEVNULL)
        commands.append(words)
    quantized_s = time.monotonic() - begun
    words = ["eval", str(model), "--against", str(base), "--data", str(held_out), "--device", args.device]
    words += ["--windows", str(args.windows), "--kv-cache-dtype", row.cache, "--json"]
    words += ["--quantization", row.scheme] if row.online else []
    commands.append(words)
    done = subprocess.run([*verb, *words], check=True, stdout=subprocess.PIPE, text=True)
    nbytes = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    if is_copy:
        shutil.rmtree(model)
    # The folders' names say nothing to others.
    shown = [" ".join(words).replace(str(args.out), "OUT").replace(str(args.model), "MODEL") for words in commands]
    return {
        "row": name,
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
        ratio, kl = row["ratio"], row["divergence"]
        change = (
            f"{100 * ratio['value'] - 100:+.2f} % ({100 * ratio['low'] - 100:+.2f} to {100 * ratio['high'] - 100:+.2f})"
        )
        cells = ROWS[name].what, ROWS[name].how, f"{row['perplexity']['value']:.2f}", change
        cells += f"{kl['value']:.4f} ({kl['low']:.4f} to {kl['high']:.4f})", f"{row['agreement']['value']:.3f}"
        cells += f"{row['bytes'] / 1e6:.0f}", f"{row['quantized_s']:.0f}"
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for mine, other, bar in BARS:
        if mine not in rows or other not in rows:
            continue
        mean, low, high = compare(rows, mine, other)
        loss = (rows[mine]["ratio"]["value"] - 1) / (rows[other]["ratio"]["value"] - 1)
        met = high < 0 if bar == BELOW else loss <= SHARES[bar]
        figures = f"divergence {mean:+.5f} ({low:+.5f} to {high:+.5f}), loss of perplexity x {loss:.2f}"
        lines.append(f"- {mine} against {other}: {figures}; bar: {bar}: {'met' if met else 'NOT met'}")
    for name, limit in LIMITS.items():
        if name in rows:
            cost = 100 * rows[name]["ratio"]["value"] - 100
            lines.append(f"- {name}: {cost:+.2f} %; bar: at most {limit} %: {'met' if cost <= limit else 'NOT met'}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder in bfloat16")
    parser.add_argument("--texts", type=Path, required=True, help="a folder of texts")
    parser.add_argument("--out", type=Path, required=True, help="a folder for what is measured")
    parser.add_argument("--rows", nargs="+", default=None, choices=ROWS)
    parser.add_argument("--base", choices=("plain", "rotated", "planted"), default="plain")
    parser.add_argument("--peer", help="the interpreter of an environment with llm-compressor")
    parser.add_argument("--windows", type=int, default=200, help="held-out windows of 512 tokens")
    parser.add_argument("--calibration-windows", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    if args.base != "plain" and config.get("quantization_config"):
        parser.error(f"--base {args.base} takes a model in bfloat16, and {args.model} is quantized")
    args.out.mkdir(parents=True, exist_ok=True)
    base, rows = make_base(args), {}
    chosen = args.rows or [name for name, row in ROWS.items() if not row.peer or args.peer]
    for row in chosen:
        path = args.out / f"{args.base}-{row.replace(' ', '-')}.json"
        if not path.is_file():
            try:
                figures = measure(row, base, args)
            except subprocess.CalledProcessError as error:
                if not ROWS[row].peer:
                    raise
                # llm-compressor takes no groups of 128 of columns such as SmolLM2's 576.
                print(f"{row}: left out, the peer ended with status {error.returncode}", file=sys.stderr)
                continue
            found = {"date": str(date.today()), "machine": platform.processor() or platform.machine(), **figures}
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        rows[row] = json.loads(path.read_text(encoding="utf-8"))
        print(f"{row}: {rows[row]['divergence']}", file=sys.stderr)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
