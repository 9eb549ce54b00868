"""Decode steps as HIP graphs, which a HIP build of torch calls CUDA graphs: one memory pool for all sizes.

Every length that the vendor's kernels need is read from tensors, so a replay needs no updates.

Source: HYGON-AI/vllm-plugin-das, tests/accuracy: its cache write is recorded and replayed this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inferplane.plugin import Batch

WARM_UPS = 2
"""Runs before recording: the first compiles kernels and makes library handles, the second allocates as every later."""


class Graphs:
    """Records steps. Graphs share a memory pool: they never run at once, and core copies what it keeps."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, step: Callable[[Batch], Any], bucket: Batch) -> Graph:
        """Run `step(bucket)`, then record it.

        Args:
            step: the step.
            bucket: a decode batch whose tensors become the graph's own.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step(bucket)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = step(bucket)
        self._pool = graph.pool()
        return Graph(graph, results)


class Graph:
    """One recorded step."""

    def __init__(self, graph: Any, results: Any) -> None:
        self._graph, self._results = graph, results

    def replay(self) -> Any:
        """Launch it; the results are the same tensors every time."""
        self._graph.replay()
        return self._results
