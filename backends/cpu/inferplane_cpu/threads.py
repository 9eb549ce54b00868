"""How many threads to compute with: one a physical core, no more than a container may use, and who decided it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

VARIABLE = "OMP_NUM_THREADS"
"""Where it is set, its number of threads is used."""


class Processors(NamedTuple):
    """What this process may compute on.

    Args:
        there: logical processors of the machine.
        allowed: those that affinity and cpuset leave to this process.
        cores: physical cores of the allowed ones.
        quota: processors' worth of time that control groups grant; None: no limit.
        nodes: NUMA nodes of the allowed ones.
    """

    total: int
    allowed: int
    cores: int
    quota: float | None = None
    nodes: int = 1


class Threads(NamedTuple):
    """A number of threads, and in words where it comes from."""

    number: int
    why: str

    def __str__(self) -> str:
        return f"{self.number} thread{'' if self.number == 1 else 's'} ({self.why})"


def processors(root: Path = Path("/"), allowed: set[int] | None = None) -> Processors:
    """Count the processors of this process.

    Args:
        root: where proc and sys are mounted.
        allowed: numbers of the processors; left out: those of this process's affinity, which cpusets narrow too.

    Returns:
        Counts; what cannot be read counts as no limit.
    """
    total = os.cpu_count() or 1
    if allowed is None:
        allowed = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(total))
    system = root / "sys/devices/system"
    cores = {_line(system / f"cpu/cpu{i}/topology/thread_siblings_list") or str(i) for i in allowed}
    nodes = [n for n in system.glob("node/node[0-9]*") if allowed & parse_processor_list(_line(n / "cpulist"))]
    limits = [limit for group in _groups(root) if (limit := _limit(group)) is not None]
    return Processors(max(total, len(allowed)), len(allowed), len(cores), min(limits, default=None), len(nodes) or 1)


def parse_processor_list(text: str) -> set[int]:
    """`0-2,8` as Linux writes sets of processors."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def best_thread_count(found: Processors) -> Threads:
    """One thread a core: a second one on the same core shares its matrix unit and its way to memory. A limit is rounded
    down, since a thread that is held back for the rest of a period holds up all that wait for it.
    """
    whole = found.cores if found.quota is None else max(1, min(found.cores, math.floor(found.quota)))
    of = f"{found.cores} physical core{'' if found.cores == 1 else 's'}"
    if found.allowed < found.total:
        of += f" within this process's affinity, {found.allowed} of {found.total} processors"
    if whole < found.cores or (found.quota is not None and found.quota < 1):
        of = f"a control group's limit of {found.quota:.4g} processors; {of}"
    if found.nodes > 1:
        of += f", over {found.nodes} NUMA nodes"
    return Threads(whole, of)


def thread_count(environment: Mapping[str, str] = os.environ, found: Processors | None = None) -> Threads:
    """What the backend computes with: what the environment says; else the best number, unless torch has fewer."""
    now = torch.get_num_threads()
    if environment.get(VARIABLE):
        return Threads(now, f"{VARIABLE}={environment[VARIABLE]}")
    recommended = best_thread_count(processors() if found is None else found)
    if now < recommended.number:
        return Threads(now, f"as torch was set, of {recommended.why}")
    return recommended


def use_best_thread_count() -> Threads:
    """Give torch the chosen number of threads; the native kernels share them."""
    found = thread_count()
    if found.number != torch.get_num_threads():
        torch.set_num_threads(found.number)
    return found


def _line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _groups(root: Path) -> Iterator[Path]:
    """Folders of this process's control groups for processor time, version 1 and 2, and of all above them."""
    mine = {}
    for line in _line(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            mine["cgroup" if controllers else "cgroup2"] = PurePosixPath(path)
    for line in _line(root / "proc/self/mountinfo").splitlines():
        mounted, filesystem = (side.split() for side in line.split(" - "))
        kind, options = filesystem[0], filesystem[-1].split(",")
        if kind not in mine or (kind == "cgroup" and "cpu" not in options):
            continue
        shown, top = mounted[3], root / mounted[4].lstrip("/")
        inside = mine[kind].is_relative_to(shown) and ".." not in mine[kind].parts
        group = top / mine[kind].relative_to(shown) if inside else top  # outside: all that is shown is the group itself
        while group != top:
            yield group
            group = group.parent
        yield top


def _limit(group: Path) -> float | None:
    """Processors' worth of time that one control group grants; None: no limit."""
    quota, _, period = _line(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _line(group / "cpu.cfs_quota_us"), _line(group / "cpu.cfs_period_us")
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max", or nothing there
        return None
