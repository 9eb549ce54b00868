"""What really ran, as a dated file: the support matrix is made of nothing else. Schema: docs/schemas/evidence.json."""

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
from inferplane.files import write_whole

SCHEMA = 1


@dataclass(frozen=True)
class Result:
    """How one case ended.

    Args:
        group: "ops", "kvcache", "models" or "hygiene".
        case: its id, as failures and xfails name it.
        status: "passed", "failed", "xfailed", "refused" (the kernel says that it does not serve it), "not run".
        op: the op it is about; empty for features.
        error: the worst error found; None where nothing is measured, or where it is infinite.
        tolerance: the largest accepted.
        detail: why, when it did not pass.
    """

    group: str
    case: str
    status: str
    op: str = ""
    error: float | None = None
    tolerance: float | None = None
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        """An entry of the file's `results`: `op` or `feature` first."""
        about = {"op": self.op} if self.op else {"feature": self.group}
        detail = {"detail": self.detail} if self.detail else {}
        return {
            **about,
            "case": self.case,
            "status": self.status,
            "error": self.error,
            "tolerance": self.tolerance,
            **detail,
        }


def level(results: Iterable[Result], *, complete: bool, emulated: bool = False) -> str:
    """The highest level that these results prove, "L0", "L2", "L3", "L4", or "none".

    L0: the declarations hold. L3: every op and KV case passed as well, L4: every model case too; on an emulator, both
    are L2. Expected failures count as such: they are listed, and do not lower the level.

    Args:
        results: everything that ran.
        complete: whether nothing was left out of the run by a user's choice.
        emulated: whether something else stood for the hardware.
    """
    by_group: dict[str, set[str]] = {}
    for r in results:
        by_group.setdefault(r.group, set()).add(r.status)

    def sound(group: str) -> bool:
        return "passed" in by_group.get(group, ()) and not by_group[group] & {"failed", "not run"}

    if not (complete and sound("hygiene")):
        return "none"
    if not (sound("ops") and sound("kvcache")):
        return "L0"
    if emulated:
        return "L2"
    return "L4" if sound("models") else "L3"


@dataclass(frozen=True)
class Run:
    """How the suite was run.

    Args:
        hardware: name and architecture of what was opened, or "none".
        command: how it was started.
        complete: whether nothing was left out by a user's choice.
        emulated: what stood for the hardware, in words; empty when it was there.
    """

    hardware: str
    command: str
    complete: bool
    emulated: str = ""


def write(where: str, subject: Subject, results: list[Result], run: Run) -> Path:
    """Write the file, whole or not at all, with the day's date and the source tree's commit; where it lies.

    In a folder, one that is there or a path that ends in "/", it is named as in l3-2026-11-23.json, with a device's
    variant at the end.
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
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def _versions(probed: Mapping[str, str], distribution: str, version: str) -> dict[str, str]:
    return {distribution: version, "inferplane": inferplane.__version__, "torch": torch.__version__, **probed}


def _commit() -> str:
    """The commit of the source tree this runs from, with "+" behind it when files differ from it; else empty."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    try:
        top = Path(git("rev-parse", "--show-toplevel"))
        if not here.is_relative_to(top / "core"):  # an installed copy that lies inside somebody else's repository
            return ""
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""
