"""`make gpu-check`: what a machine with a GPU can prove and measure, from the source tree, within eight minutes.

    python benchmarks/gpu/check.py [--out FOLDER] [--only PART,...] [--again] [--budget SECONDS]

Nothing is installed. Each part is a process of its own with a time limit; its result is a file in the folder, and a
part whose file is there already is not run again (`--again` does), so a run that was cut off goes on where it stopped.
At the end `gpu-check-DATE.json` and `gpu-check-DATE.md` hold everything that is there. Exit status 1 when a part
failed, found something wrong, or was left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMITS_S = {"correct": 110, "engine": 60, "mla": 110, "conformance": 200, "gqa": 60, "prefill": 60}
"""Most seconds of each part, in the order in which they run: what tells most comes first."""
BUDGET_S = 460


def environment() -> dict[str, str]:
    paths = [str(ROOT), *(str(ROOT / p) for p in ("core", "backends/cuda", "backends/cpu"))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "INFERPLANE_PLUGINS": "only,inferplane_cuda.plugin",
        "PYTHONUNBUFFERED": "1",
    }


def command(part: str, result: Path) -> list[str]:
    if part != "conformance":
        return [sys.executable, "-m", "benchmarks.gpu.parts", part, str(result)]
    workers = str(max(1, min(12, (os.cpu_count() or 2) - 2)))
    suite = ["-p", "inferplane.conformance.plugin", "--pyargs", "inferplane.conformance", "--device", "cuda"]
    return [sys.executable, "-m", "pytest", "-q", "-n", workers, *suite, "--evidence", str(result)]


def run(part: str, result: Path, limit_s: float) -> str:
    """Run one part; in words what went wrong, empty when it ended well."""
    log = result.with_suffix(".log")
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command(part, result), env=environment(), cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no end within {limit_s:.0f} s"
    if done.returncode == 0:
        return ""
    return f"exit status {done.returncode}: " + "; ".join(log.read_text(errors="replace").strip().splitlines()[-3:])


def versions() -> dict[str, str]:
    code = (
        "import json, torch\n"
        "found = {'torch': torch.__version__, 'cuda': torch.version.cuda or ''}\n"
        "try:\n    import triton; found['triton'] = triton.__version__\nexcept ImportError: pass\n"
        "if torch.cuda.is_available():\n    found['gpu'] = torch.cuda.get_device_name(0)\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment())
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {"torch": "not found"}
    return {**found, "python": platform.python_version()}


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip()


def faults(part: str, content: Any) -> list[str]:
    """What a part found to be wrong."""
    rows = content["results"] if isinstance(content, dict) else content
    wrong = [row for row in rows if row.get("passed") is False or row.get("status") == "failed"]
    wrong += [row for row in rows if isinstance(row.get("error"), str)]
    return [f"{part}: {json.dumps(row)[:300]}" for row in wrong]


def table(parts: dict[str, Any]) -> str:
    lines = ["| shape | KV | kernel | us | GB/s | TFLOPS | share of roof |", "|---|---|---|---|---|---|---|"]
    for part in ("mla", "gqa", "prefill"):
        rows = [row for row in parts.get(part, []) if "shape" in row]
        for row in sorted(rows, key=lambda r: (r["shape"], r["kv"], r.get("us", 1e12))):
            told = row.get("error") or ""
            cells = [row["shape"], row["kv"], row["kernel"], row.get("us", "-"), row.get("gbps", "-")]
            lines.append(
                "| " + " | ".join(map(str, [*cells, row.get("tflops", "-"), row.get("share_of_roof", told)])) + " |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check")
    parser.add_argument("--only", default=",".join(LIMITS_S))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--budget", type=float, default=BUDGET_S)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    begun, wrong, parts = time.monotonic(), [], {}
    for part in given.only.split(","):
        result = given.out / f"{part}.json"
        if given.again:
            result.unlink(missing_ok=True)
        left = given.budget - (time.monotonic() - begun)
        if not result.exists():
            fault = run(part, result, min(LIMITS_S[part], left)) if left > 15 else "not run: no time left; run it again"
            wrong += [f"{part}: {fault}"] if fault else []
            print(f"{part}: {fault or 'done'} ({time.monotonic() - begun:.0f} s)", flush=True)
        if result.exists():
            parts[part] = json.loads(result.read_text())
            wrong += faults(part, parts[part])
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    whole = {"date": today, "commit": commit(), "versions": versions(), "wrong": wrong, "parts": parts}
    (given.out / f"gpu-check-{today}.json").write_text(json.dumps(whole, indent=1) + "\n")
    (given.out / f"gpu-check-{today}.md").write_text(table(parts))
    print(table(parts), *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
