"""Results of a run as a dated file, from which the support matrix is generated. Schema: docs/schemas/evidence.json."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import inferplane
from inferplane.conformance.subject import Subject
from inferplane.files import write_atomically

SCHEMA = 1


@dataclass(frozen=True)
class CaseResult:
    """The result of one case.

    Args:
        group: "ops", "kvcache", "models" or "hygiene".
        case: its id in failures and xfails.
        status: "passed", "failed", "xfailed", "refused" (the kernel does not accept it), "not run".
        op: the op under test; empty for features.
        error: the largest error; None if nothing is measured or it is infinite.
        tolerance: the largest accepted error.
        detail: the reason if it did not pass.
    """

    group: str
    case: str
    status: str
    op: str = ""
    error: float | None = None
    tolerance: float | None = None
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        """An entry of `results` in the file; its first key is `op` or `feature`."""
        about = {"op": self.op} if self.op else {"feature": self.group}
        shown = ("case", "status", "error", "tolerance", *(["detail"] if self.detail else []))
        return {**about, **{name: getattr(self, name) for name in shown}}


def level(results: Iterable[CaseResult], *, complete: bool, emulated: bool = False) -> str:
    """Return the highest level that these results prove: "L0", "L2", "L3", "L4", or "none".

    L0: the declarations are right. L3: all op and KV cases pass too. L4: all model cases pass too. On an emulator, L3
    and L4 are L2. Expected failures are listed and do not lower the level.

    Args:
        results: of all cases.
        complete: True if the user did not select a part of the suite.
        emulated: True if an emulator replaced the hardware.
    """
    by_group: dict[str, set[str]] = {}
    for r in results:
        by_group.setdefault(r.group, set()).add(r.status)

    def all_passed(group: str) -> bool:
        return "passed" in by_group.get(group, ()) and not by_group[group] & {"failed", "not run"}

    if not (complete and all_passed("hygiene")):
        return "none"
    if not (all_passed("ops") and all_passed("kvcache")):
        return "L0"
    if emulated:
        return "L2"
    return "L4" if all_passed("models") else "L3"


@dataclass(frozen=True)
class Run:
    """How the suite was run.

    Args:
        hardware: name and architecture of the opened device, or "none".
        command: the command line.
        complete: True if the user did not select a part of the suite.
        emulated: in words, what emulated the hardware; empty on real hardware.
    """

    hardware: str
    command: str
    complete: bool
    emulated: str = ""


def write(where: str, subject: Subject, results: list[CaseResult], run: Run) -> Path:
    """Write the file atomically, with the date and the commit of the source tree, and return its path.

    If `where` is an existing folder or ends with "/", the file's name has the form l3-2026-11-23.json, with the variant
    of the device at the end.
    """
    entry, path = subject.entry, Path(where)
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "backend": subject.name,
        "level": level(results, complete=run.complete, emulated=bool(run.emulated)),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "versions": _versions(entry.probe.versions, entry.distribution, entry.version),
        "hardware": f"none; {run.hardware} emulated by {run.emulated}" if run.emulated else run.hardware,
        "command": run.command,
        "results": [r.as_json() for r in sorted(results, key=lambda r: r.case)],
    }
    if path.is_dir() or where.endswith("/"):
        variant = subject.name.partition(":")[2]
        path /= "-".join(filter(None, (content["level"].lower(), content["date"], variant))) + ".json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def _versions(probed: Mapping[str, str], distribution: str, version: str) -> dict[str, str]:
    return {distribution: version, "inferplane": inferplane.__version__, "torch": torch.__version__, **probed}


def _commit() -> str:
    """The commit of the source tree, with "+" after it if tracked files differ; empty for an installed package."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    try:
        top = Path(git("rev-parse", "--show-toplevel"))
        if not here.is_relative_to(top / "core"):  # an installed copy inside another repository
            return ""
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""
