"""Decode steps as XPU graphs: torch.xpu's counterpart of CUDA graphs, with one memory pool for all sizes.

torch 2.13 has them, older ones may not; vLLM records its own only when it is asked to. Every length that the vendor's
kernels need is read from tensors, so a replay needs no updates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inferplane.plugin import Batch

WARM_UPS = 2
"""Runs before recording: the first loads kernels and makes handles, the second allocates as every later."""


class Graphs:
    """Records steps. Graphs share a memory pool: they never run at once, and core copies what it keeps."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, runtime: Any, step: Callable[[Batch], Any], bucket: Batch) -> Graph | None:
        """Run `step(bucket)`, then record it; None where this torch has no XPU graphs.

        Args:
            runtime: `torch.xpu`.
            step: the step. bucket: a decode batch whose tensors become the graph's own.
        """
        if not hasattr(runtime, "XPUGraph"):
            return None
        stream = runtime.Stream()
        stream.wait_stream(runtime.current_stream())
        with runtime.stream(stream):
            for _ in range(WARM_UPS):
                step(bucket)
        runtime.current_stream().wait_stream(stream)
        graph = runtime.XPUGraph()
        with runtime.graph(graph, pool=self._pool):
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
