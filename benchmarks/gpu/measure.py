"""Timing on a GPU: many calls in one CUDA graph, on inputs that together are larger than the L2 cache."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

L2_TIMES = 4
REPEATS = 7
DEVICE = "cuda"
COPY_BYTES, MATRIX = 1 << 30, 8192
"""What the roofs are measured on: bytes that are copied, rows of square matrices."""


def copies_for(nbytes: float) -> int:
    """How many sets of inputs of `nbytes` are needed so that none is found in the L2 cache when it is used again."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(64, math.ceil(L2_TIMES * l2 / nbytes)))


def microseconds(calls: Sequence[Callable[[], Any]], least_us: float = 2000.0) -> float:
    """Median time of a call. The calls run in turn, recorded in one graph, so that launching costs nothing.

    Args:
        calls: the same work on different inputs.
        least_us: a replay lasts at least so long.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    rounds = 1
    while True:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        times = _replays(graph)
        if times[0] >= least_us or rounds >= 64:
            return statistics.median(times) / (rounds * len(calls))
        rounds = min(64, max(rounds + 1, math.ceil(rounds * least_us / max(times[0], 1.0))))


def timed(calls: Sequence[Callable[[], Any]]) -> tuple[float, str]:
    """Median time of a call in us, and how the calls were launched: "graph", or "eager" for those that cannot be
    recorded because they plan on the host.
    """
    try:
        return microseconds(calls), "graph"
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(REPEATS):
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times) / len(calls), "eager"


def _replays(graph: Any) -> list[float]:
    graph.replay()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return times


def roofs() -> dict[str, float]:
    """Of this GPU, now: copy bandwidth in GB/s (read and write counted), bf16 and FP8 products in TFLOPS."""
    size = COPY_BYTES
    source, target = torch.randn(size // 4, device=DEVICE), torch.empty(size // 4, device=DEVICE)
    copy = 2 * size / microseconds([lambda: target.copy_(source)]) / 1e3
    n = MATRIX
    a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    bf16 = 2 * n**3 / microseconds([lambda: a @ b]) / 1e6
    found = {"copy_gbps": copy, "bf16_tflops": bf16}
    one = torch.ones((), device=DEVICE)
    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    try:
        call = lambda: torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
        found["fp8_tflops"] = 2 * n**3 / microseconds([call]) / 1e6
    except RuntimeError as error:
        print(f"no FP8 product here: {error}")
    return found
