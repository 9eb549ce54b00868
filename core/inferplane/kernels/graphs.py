"""Decode steps as graphs, on runtimes whose streams and graphs are used like those of torch's own accelerators.

Kernels must read every length that they need from tensors, which is all that a replay updates. Promised to backends
like `inferplane.plugin`: names keep their meaning within one API major.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from inferplane.plugin import Accelerator, Batch

WARM_UPS = 2
"""Runs before recording: the first loads or compiles kernels and makes libraries' handles, the second allocates as
every later."""


class Graphs:
    """Records steps. Graphs share a memory pool: they never run at once, and core copies what it keeps.

    Args:
        kind: name of the runtime's class of graphs.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._pool: Any = None

    def record(self, runtime: Any, step: Callable[[Batch], Any], bucket: Batch) -> CapturedGraph | None:
        """Run `step(bucket)` aside, then record it; None, and nothing is run, where the runtime has no such graphs.

        Each run has a copy of the bucket with the same tensors and an empty scratch: what kernels keep there must be
        computed within the graph, or a replay would read what a warm-up computed.

        Args:
            runtime: the device's module in torch, with `Stream`, `current_stream`, `stream` and `graph`.
            step: the step.
            bucket: a decode batch whose tensors become the graph's own.

        Raises:
            RuntimeError: the step waits for the device, or does something else that cannot be recorded.
        """
        if not hasattr(runtime, self.kind):
            return None
        stream = runtime.Stream()
        stream.wait_stream(runtime.current_stream())
        with runtime.stream(stream):
            for _ in range(WARM_UPS):
                step(replace(bucket))
        runtime.current_stream().wait_stream(stream)
        graph = getattr(runtime, self.kind)()
        with runtime.graph(graph, pool=self._pool):
            results = step(replace(bucket))
        self._pool = graph.pool()
        return CapturedGraph(graph, results)


class CapturedGraph:
    """One recorded step."""

    def __init__(self, graph: Any, results: Any) -> None:
        self._graph, self._results = graph, results

    def replay(self) -> Any:
        """Launch it; the results are the same tensors every time."""
        self._graph.replay()
        return self._results


class CapturingAccelerator(Accelerator):
    """A backend whose runtime records graphs; decode steps become such."""

    graph: ClassVar[str]
    """(required) Name of the runtime's class of graphs."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self._graphs = Graphs(self.graph)

    def capture(self, step: Callable[[Batch], Any], bucket: Batch) -> CapturedGraph | None:
        """As a graph of the runtime; None where it has none."""
        return self._graphs.record(self.runtime(), step, bucket)
