"""Ranks as threads of one process, whose sums meet in memory: divided ops and models without a launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")
SECONDS = 60


def run_ranks(function: Callable[[int], T], ranks: int, patch: pytest.MonkeyPatch) -> list[T]:
    """What a function of the rank returns on each of so many ranks, which sum over all of them by `AllReduce`."""
    barrier, parts, own = threading.Barrier(ranks, timeout=SECONDS), {}, threading.local()

    def all_reduce(x: torch.Tensor) -> None:
        parts[own.rank] = x.clone()
        barrier.wait()
        total = torch.stack([parts[rank] for rank in range(ranks)]).sum(0)
        barrier.wait()  # before the next sum replaces the parts
        x.copy_(total)

    def run(rank: int) -> T:
        own.rank = rank
        try:
            return function(rank)
        except BaseException:
            barrier.abort()
            raise

    patch.setattr(torch.distributed, "all_reduce", all_reduce)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
