"""`make gpu-check`: what a machine with a GPU can prove and measure, from the source tree, within eight minutes.

    python benchmarks/gpu/check.py [--out FOLDER] [--only PART,...] [--again] [--budget SECONDS]

Nothing is installed. Each part is a process of its own with a time limit, or several side by side; what it finds is a
file in the folder, and a part whose file is there already is not run again (`--again` does), so a run that was cut off
goes on where it stopped. What an unfinished part has found until then is told as well.
At the end `gpu-check-DATE.json` and `gpu-check-DATE.md` hold everything that is there. Exit status 1 when a part
failed, found something wrong, or was left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda"
PIECES = ("latent_16", "latent_128", "expanded", "dense", "window")
"""Of the part "correct"; see `benchmarks.gpu.parts.PIECES`."""
LIMITS_S = {"correct": 110, "engine": 80, "mla": 110, "conformance": 200, "gqa": 60, "prefill": 60,
            "gemm": 90, "experts": 60, "drafting": 90, "decode": 240}  # fmt: skip
"""Most seconds of each part, in the order in which they run: what tells most comes first."""
BUDGET_S = 460
LEAST_S = 15
"""A part is not begun with less time left."""


def environment() -> dict[str, str]:
    paths = [str(ROOT), *(str(ROOT / p) for p in ("core", "backends/cuda", "backends/cpu"))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "INFERPLANE_PLUGINS": "only,inferplane_cuda.plugin",
        "PYTHONUNBUFFERED": "1",
    }


NEEDED = (
    "torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "pluggy", "msgspec", "jinja2", "rich",
)  # fmt: skip
SUITE = ("pytest", "hypothesis")
"""What the conformance suite needs beside."""


def missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if find_spec(name) is None]


def commands(part: str, result: Path) -> dict[Path, list[str]]:
    """What a part runs, side by side, by the file that each writes."""
    if part == "conformance":
        workers = str(max(1, min(12, (os.cpu_count() or 2) - 2)))
        many = [] if missing(("xdist",)) else ["-n", workers]
        suite = ["-p", "inferplane.conformance.plugin", "--pyargs", "inferplane.conformance", "--device", DEVICE]
        return {result: [sys.executable, "-m", "pytest", "-q", *many, *suite, "--evidence", str(result)]}
    if part != "correct":
        return {result: [sys.executable, "-m", "benchmarks.gpu.parts", part, str(result)]}
    names = {piece: result.with_name(f"correct.{piece}.json") for piece in PIECES}
    return {
        file: [sys.executable, "-m", "benchmarks.gpu.parts", f"correct.{piece}", str(file)]
        for piece, file in names.items()
        if not file.exists()
    }


def run(part: str, result: Path, limit_s: float) -> str:
    """Run one part; in words what went wrong, empty when it ended well."""
    until, started = time.monotonic() + limit_s, []
    for file, words in commands(part, result).items():
        with file.with_suffix(".log").open("w") as log:
            process = subprocess.Popen(
                words, env=environment(), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        started.append((file, process))
    told = [_ended(file, process, until, limit_s) for file, process in started]
    return "; ".join(filter(None, told))


def _ended(file: Path, process: subprocess.Popen[bytes], until: float, limit_s: float) -> str:
    try:
        status = process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"{file.stem}: no end within {limit_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):  # workers of its own go with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status == 0:
        return ""
    lines = file.with_suffix(".log").read_text(errors="replace").strip().splitlines()
    return f"{file.stem}: exit status {status}: " + "; ".join(lines[-3:])


def found(part: str, out: Path) -> Any:
    """What a part has written, unfinished pieces too; None when there is nothing."""
    result = out / f"{part}.json"
    if part != "correct":
        file = result if result.exists() else result.with_name(result.name + ".part")
        return json.loads(file.read_text()) if file.exists() else None
    pieces = [found(f"correct.{piece}", out) for piece in PIECES]
    return [row for rows in pieces if rows for row in rows] or None


def done(part: str, out: Path) -> bool:
    names = [f"correct.{piece}" for piece in PIECES] if part == "correct" else [part]
    return all((out / f"{name}.json").exists() for name in names)


def versions() -> dict[str, str]:
    code = (
        "import json, torch\n"
        "found = {'torch': torch.__version__, 'cuda': torch.version.cuda or ''}\n"
        "try:\n    import triton; found['triton'] = triton.__version__\nexcept ImportError: pass\n"
        "if torch.cuda.is_available():\n    found['gpu'] = torch.cuda.get_device_name(0)\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment())
    told: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {"torch": "not found"}
    return {**told, "python": platform.python_version()}


def commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    except OSError:
        return ""
    return done.stdout.strip()


def faults(part: str, content: Any) -> list[str]:
    """What a part found to be wrong."""
    rows = content["results"] if isinstance(content, dict) else content
    wrong = [row for row in rows if row.get("passed") is False or row.get("status") == "failed"]
    wrong += [row for row in rows if isinstance(row.get("error"), str) and "passed" not in row and not row.get("peer")]
    return [f"{part}: {json.dumps(row)[:300]}" for row in wrong]


def table(parts: dict[str, Any]) -> str:
    lines = ["| shape | KV | kernel | us | GB/s | TFLOPS | share of roof |", "|---|---|---|---|---|---|---|"]
    for part in ("mla", "gqa", "prefill", "gemm", "experts"):
        rows = [row for row in parts.get(part, []) if "shape" in row]
        for row in sorted(rows, key=lambda r: (r["shape"], r["kv"], r.get("us", 1e12))):
            told = row.get("error") or ""
            cells = [row["shape"], row["kv"], row["kernel"], row.get("us", "-"), row.get("gbps", "-")]
            lines.append(
                "| " + " | ".join(map(str, [*cells, row.get("tflops", "-"), row.get("share_of_roof", told)])) + " |"
            )
    return "\n".join(lines) + "\n"


def steps_table(rows: list[dict[str, Any]]) -> str:
    """Decode steps, then the kernels of each."""
    names = ("us", "floor_us", "sum_of_floors_us", "kernels", "busy_us", "idle")
    lines = [f"| step | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        if "step" in row and "kernel" not in row and "what" not in row:
            label = f"{row['step']} {row.get('mode', '')}".strip()
            cells = [
                row.get("error") or row.get("us", row.get("step_us", "-")),
                *(row.get(name, "-") for name in names[1:]),
            ]
            lines.append("| " + " | ".join(map(str, [label, *cells])) + " |")
    lines += ["", "| step | kernel | times | us |", "|---|---|---|---|"]
    lines += [f"| {r['step']} | {r['kernel']} | {r['times']} | {r['kernel_us']} |" for r in rows if "kernel" in r]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check")
    parser.add_argument("--only", default=",".join(LIMITS_S))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--budget", type=float, default=BUDGET_S)
    given = parser.parse_args()
    chosen = given.only.split(",")
    if unknown := sorted(set(chosen) - set(LIMITS_S)):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(LIMITS_S)}")
    if lacking := missing(NEEDED + (SUITE if "conformance" in chosen else ())):
        parser.error(f"{sys.executable} lacks {', '.join(lacking)}; nothing was run")
    given.out.mkdir(parents=True, exist_ok=True)
    if given.again:
        for part in chosen:
            for file in [*given.out.glob(f"{part}.json*"), *given.out.glob(f"{part}.*.json*")]:
                file.unlink()
    begun, wrong, parts = time.monotonic(), [], {}
    for part in chosen:
        left = given.budget - (time.monotonic() - begun)
        if not done(part, given.out):
            limit_s = min(LIMITS_S[part], left)
            fault = (
                run(part, given.out / f"{part}.json", limit_s)
                if left > LEAST_S
                else "not run: no time left; run it again"
            )
            wrong += [f"{part}: {fault}"] if fault else []
            print(f"{part}: {fault or 'done'} ({time.monotonic() - begun:.0f} s)", flush=True)
        if (rows := found(part, given.out)) is not None:
            parts[part] = rows
            wrong += faults(part, rows)
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    whole = {"date": today, "commit": commit(), "versions": versions(), "wrong": wrong, "parts": parts}
    (given.out / f"gpu-check-{today}.json").write_text(json.dumps(whole, indent=1) + "\n")
    steps = [row for part in ("drafting", "decode") for row in parts.get(part, [])]
    tables = table(parts) + (f"\n{steps_table(steps)}" if steps else "")
    (given.out / f"gpu-check-{today}.md").write_text(tables)
    print(tables, *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
