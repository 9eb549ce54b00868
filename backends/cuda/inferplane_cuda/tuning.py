"""Ranks from measurements: kernels that `make gpu-check` found to be the fastest on this kind of GPU win.

`INFERPLANE_CUDA_TUNING` names a file that the check has written (`gpu-check-DATE.json`). Without one, ranks are the
declared ones.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferplane.plugin import RANK_TUNED, Kernel, UsageError

TUNING_VARIABLE = "INFERPLANE_CUDA_TUNING"
TIMED_PARTS = ("mla", "gqa", "prefill")
"""The check's parts that time ops."""
WHOLE_OP_SUFFIX = " whole op"
"""Behind the name of a kernel in rows that time an op as a model calls it."""


def find_fastest(rows: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Find the kernels that no other of their op beats, by the geometric mean of times on the shapes that both ran.

    Args:
        rows: of the check's parts: `kernel` ("provider:op", perhaps with " whole op"), `shape`, `kv`, `us`.

    Returns:
        Names, "provider:op". An op has several where they ran on different shapes, as those do that take other ones.
    """
    times: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        name = str(row.get("kernel", "")).removesuffix(WHOLE_OP_SUFFIX)
        provider, colon, op = name.partition(":")
        if provider and colon and "us" in row and row.get("kv") == "auto":
            times[op][name][str(row["shape"])] = math.log(float(row["us"]))

    def beaten(mine: dict[str, float], other: dict[str, float]) -> bool:
        shared = mine.keys() & other.keys()
        return sum(other[shape] for shape in shared) < sum(mine[shape] for shape in shared)

    return frozenset(
        name
        for kernels in times.values()
        for name, mine in kernels.items()
        if len(kernels) > 1 and not any(beaten(mine, other) for other in kernels.values())
    )


def load_measured() -> frozenset[str]:
    """The fastest kernels of the file that the environment variable names; empty without one.

    Raises:
        UsageError: there is no such file, or it is not the check's.
    """
    path = os.environ.get(TUNING_VARIABLE)
    if not path:
        return frozenset()
    try:
        parts = json.loads(Path(path).read_text(encoding="utf-8"))["parts"]
        return find_fastest(row for name in TIMED_PARTS for row in parts.get(name, ()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{TUNING_VARIABLE}={path} cannot be read ({type(error).__name__}: {error}).",
            remedy="name the JSON file that `make gpu-check` has written, or unset the variable",
        ) from error


def rank_measured(kernels: list[Kernel], best: Collection[str]) -> list[Kernel]:
    """The same kernels, those in `best` with the rank of tuned ones."""
    note = "measured to be the fastest on this machine's kind of GPU"
    return [replace(k, rank=RANK_TUNED, note=note) if k.name in best and not k.extra_error else k for k in kernels]
