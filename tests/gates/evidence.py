"""Level L2 as a dated file, from what pytest wrote of the runs: `python -m tests.gates.evidence FILE REPORT.xml...`.

Tests say what they are about by properties: `op` or `feature`, `kernel` (its name in full, or several), `error`,
`tolerance`; `backend`, where it is not cuda.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

BACKEND = "cuda"
COMMAND = (
    "make test-gates; python -m pytest backends/cuda/tests/test_*_emulated.py --junitxml build/gates/emulated.xml; "
    "python -m tests.gates.evidence FILE "
)
"""What makes the reports; those that a file was made of follow."""


def results(report: Path) -> list[dict[str, Any]]:
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        told = {p.get("name"): p.get("value") for p in case.iter("property")}
        if not {"op", "feature"} & told.keys() or told.get("backend", BACKEND) != BACKEND:
            continue
        about = {"op": told["op"]} if "op" in told else {"feature": told["feature"]}
        failed = case.find("failure") is not None or case.find("error") is not None
        kernels = ", ".join(p.get("value") or "" for p in case.iter("property") if p.get("name") == "kernel")
        numbers = {k: float(told[k]) if k in told else None for k in ("error", "tolerance")}
        where = (case.get("classname") or "").rpartition(".")[2].removeprefix("test_")
        named = "/".join(filter(None, (kernels, where, case.get("name"))))
        found.append({**about, "case": named, "status": "failed" if failed else "passed", **numbers})
    return found


def main(path: str, *reports: str) -> None:
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
    ).stdout
    found = [row for report in reports for row in results(Path(report))]
    assert found, "no test told what it is about"
    content = {
        "schema": 1,
        "backend": BACKEND,
        "level": "L2" if all(row["status"] == "passed" for row in found) else "none",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit + ("+" if changed else ""),
        "versions": {name: version(name) for name in ("inferplane", "torch", "triton")} | {"triton offline": "3.6.0"},
        "hardware": f"{platform.machine()}, no accelerator: interpreted, emulated and compiled, not run on a GPU",
        "command": COMMAND + " ".join(reports),
        "results": sorted(found, key=lambda row: row["case"]),
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
