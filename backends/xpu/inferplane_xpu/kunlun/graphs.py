"""Decode steps as graphs: torch.cuda's, which torch_xmlir turns into graphs of the card, one memory pool for all sizes.

Source: baidu/vLLM-Kunlun at 09869ee7, docs/source/user_guide/configuration/env_vars.md (XMLIR_FORCE_USE_XPU_GRAPH) and
vllm_kunlun/platforms/kunlun.py, which leaves capture to vLLM's own code for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inferplane.plugin import Batch

SWITCH = "XMLIR_FORCE_USE_XPU_GRAPH"
"""The environment variable that makes torch_xmlir record; at "1" it does."""
WARM_UPS = 2
"""Runs before recording: the first loads libraries and makes handles, the second allocates as every later."""


class Graphs:
    """Records steps. Graphs share a memory pool: they never run at once, and core copies what it keeps."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, step: Callable[[Batch], Any], bucket: Batch) -> Graph:
        """Run `step(bucket)`, then record it.

        Args:
            step: the step. bucket: a decode batch whose tensors become the graph's own.
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
