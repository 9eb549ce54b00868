"""Promised to backends: decode steps as graphs, on runtimes whose streams and graphs work like those of torch's own.

A backend derives from `CapturingAccelerator` and names its runtime's class of graphs; core then captures decode steps
and replays them. Kernels of a captured step must read every length from tensors, since a replay changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from inferplane.plugin import Accelerator, Batch
from inferplane.renamed import old_attributes, old_names, old_names_of_module, warn_of_old_name

WARM_UPS = 2
"""Runs before the capture: the first loads or compiles kernels and creates libraries' handles, the second allocates
memory as every later run does."""


@old_attributes({"record": "capture"})
@old_names({"kind": "graph_class"})
class GraphCapturer:
    """Captures steps on one device. Its graphs share a memory pool: they never run at once, and core copies results
    that it keeps.

    Args:
        graph_class: name of the class of graphs in the device's torch module ("CUDAGraph").
    """

    def __init__(self, graph_class: str) -> None:
        self.graph_class = graph_class
        self._pool: Any = None

    def capture(self, runtime: Any, step: Callable[[Batch], Any], bucket: Batch) -> CapturedGraph | None:
        """Run `step(bucket)` `WARM_UPS` times on a stream of its own, then capture it as a graph, which reads and
        writes the same tensors at every replay.

        Each run has a copy of the bucket with the same tensors and an empty scratch: what kernels keep there must be
        computed within the graph, or a replay would read what a warm-up computed.

        Args:
            runtime: the device's module in torch, with `Stream`, `current_stream`, `stream` and `graph`.
            step: the step.
            bucket: a decode batch of the size to capture; its tensors become the graph's inputs.

        Returns:
            The captured step; None, without running anything, where the runtime has no such class.

        Raises:
            RuntimeError: the step waits for the device, or does something else that cannot be captured.
        """
        if not hasattr(runtime, self.graph_class):
            return None
        stream = runtime.Stream()
        stream.wait_stream(runtime.current_stream())
        with runtime.stream(stream):
            for _ in range(WARM_UPS):
                step(replace(bucket))
        runtime.current_stream().wait_stream(stream)
        graph = getattr(runtime, self.graph_class)()
        with runtime.graph(graph, pool=self._pool):
            results = step(replace(bucket))
        self._pool = graph.pool()
        return CapturedGraph(graph, results)


class CapturedGraph:
    """One captured step and the tensors that hold its results."""

    def __init__(self, graph: Any, results: Any) -> None:
        self._graph, self._results = graph, results

    def replay(self) -> Any:
        """Launch the graph on what the bucket's tensors hold now, without waiting for it. The results are the same
        tensors every time, which the next replay overwrites.
        """
        self._graph.replay()
        return self._results


class CapturingAccelerator(Accelerator):
    """Base of a backend whose runtime has graphs: its decode steps are captured."""

    graph_class: ClassVar[str]
    """(required) Name of the class of graphs in the device's torch module ("CUDAGraph")."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if isinstance(old := vars(cls).get("graph"), str) and "graph_class" not in vars(cls):
            warn_of_old_name(f"{cls.__name__}.graph", "graph_class")
            cls.graph_class = old

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self._capturer = GraphCapturer(self.graph_class)

    def capture(self, step: Callable[[Batch], Any], bucket: Batch) -> CapturedGraph | None:
        """Capture `step(bucket)` as `GraphCapturer.capture` does; None where the runtime has no graphs."""
        return self._capturer.capture(self.runtime(), step, bucket)


__getattr__ = old_names_of_module(
    __name__,
    {"Graphs": "GraphCapturer", "Graph": "CapturedGraph", "RecordingAccelerator": "CapturingAccelerator"},
)
